// Reading and checking the steps of a plan.
#include "steps.h"

#include <iterator>
#include <string>
#include <type_traits>

namespace onnxfuse {
namespace {

constexpr int64_t kMaxBox = 256;
constexpr int64_t kMaxStride = (int64_t{1} << 40) - 16;
constexpr int64_t kMaxMapSize = int64_t{1} << 32;

Dim read_dim(WordReader& reader, const char* what, int64_t x, int64_t y, int64_t z) {
  const auto size = [&](int64_t max) { return static_cast<uint32_t>(reader.next(what, 1, max)); };
  const uint32_t first = size(x), second = size(y);  // x and y are read before z
  return {first, second, size(z)};
}

Pointer read_pointer(WordReader& reader, const Extents* extents) {
  constexpr int64_t kMaxCount = 4096;  // the limit of an index if the number of buffers is not known
  const int64_t kind = reader.next("a pointer's kind", 0, 2);
  const int64_t count = extents ? static_cast<int64_t>(extents->of[kind].size()) : kMaxCount;
  const auto index = static_cast<size_t>(reader.next("a pointer's index", 0, count - 1));
  const int64_t offset = reader.next("a pointer's offset", 0, extents ? extents->of[kind][index].bytes : kMaxBytes);
  return {static_cast<MemoryKind>(kind), index, static_cast<uint64_t>(offset)};
}

const Extent& extent_of(const Extents& extents, const Pointer& pointer) {
  return extents.of[static_cast<size_t>(pointer.kind)][pointer.index];
}

// --- tensor maps -----------------------------------------------------------------------------------------------------

struct MapType {
  int64_t dtype;  // TensorProto.DataType, or kTfloat32
  int type;       // CUtensorMapDataType
  int64_t bytes;
};
constexpr int64_t kTfloat32 = 1000;  // as in plan_bytes.py
constexpr MapType kMapTypes[] = {{1, 7, 4}, {2, 0, 1}, {10, 6, 2}, {16, 9, 2}, {kTfloat32, 11, 4}};

const MapType& read_map_type(WordReader& reader) {
  const int64_t dtype = reader.next("a tensor map's dtype", 1, 1000);
  for (const MapType& type : kMapTypes) {
    if (type.dtype == dtype) return type;
  }
  malformed("a tensor map is of " + dtype_name(static_cast<int>(dtype)) +
            ", required float32, float16, bfloat16, uint8 or tfloat32");
}

// Reads the walk over the pixels of a convolution, if the tensor map has one (see TensorMap::im2col).
void read_im2col(WordReader& reader, TensorMap& map) {
  for (uint32_t& stride : map.element_strides) stride = 1;
  map.im2col = reader.next("whether a tensor map walks over pixels", 0, 1);
  if (!map.im2col) return;
  if (map.rank < 3) malformed("a tensor map over pixels has " + std::to_string(map.rank) + " dimensions, required 3");
  const uint32_t axes = map.rank - 2;
  const int64_t most = axes == 1 ? 32767 : axes == 2 ? 127 : 15;  // the driver's limits
  const auto read = [&](const char* what, int64_t low, int64_t high, auto* values) {
    if (const size_t found = reader.count("the number of spatial axes", kMaxTensorMapRank); found != axes) {
      malformed("a tensor map of " + std::to_string(map.rank) + " dimensions walks over " + std::to_string(axes) +
                " spatial axes, found " + std::to_string(found));
    }
    for (uint32_t i = 0; i < axes; ++i) {
      values[i] = static_cast<std::remove_reference_t<decltype(*values)>>(reader.next(what, low, high));
    }
  };
  read("a tensor map's lower corner", -most - 1, most, map.lower);
  read("a tensor map's upper corner", -most - 1, most, map.upper);
  read("a tensor map's step", 1, 8, map.element_strides + 1);
}

// Returns the number of the box's dimensions.
size_t read_sizes(WordReader& reader, TensorMap& map) {
  map.rank = static_cast<uint32_t>(reader.next("a tensor map's rank", 1, kMaxTensorMapRank));
  for (uint32_t i = 0; i < map.rank; ++i) {
    map.sizes[i] = static_cast<uint64_t>(reader.next("a tensor map's size", 1, kMaxMapSize));
  }
  if (const size_t strides = reader.count("the number of strides", kMaxTensorMapRank); strides + 1 != map.rank) {
    malformed("a tensor map of " + std::to_string(map.rank) + " dimensions has " + std::to_string(map.rank - 1) +
              " strides, found " + std::to_string(strides));
  }
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    map.strides[i] = static_cast<uint64_t>(reader.next("a tensor map's stride", 0, kMaxStride));
    if (map.strides[i] % 16 != 0) {
      malformed("a tensor map's stride is " + std::to_string(map.strides[i]) + " bytes, required a multiple of 16");
    }
  }
  const auto box = static_cast<size_t>(reader.next("the rank of a tensor map's box", 1, kMaxTensorMapRank));
  for (size_t i = 0; i < box; ++i) {
    map.box[i] = static_cast<uint32_t>(reader.next("a tensor map's box", 1, kMaxBox));
  }
  return box;
}

void check_box(const TensorMap& map, size_t box, int64_t element) {
  if (const size_t required = map.im2col ? 2 : map.rank; box != required) {
    malformed("a tensor map of " + std::to_string(map.rank) + " dimensions has a box of " + std::to_string(required) +
              ", found " + std::to_string(box));
  }
  if (map.box[0] * element % 16 != 0) {
    malformed("a tensor map's box is " + std::to_string(map.box[0] * element) +
              " bytes wide, required a multiple of 16");
  }
}

void read_swizzle(WordReader& reader, int64_t element, TensorMap& map) {
  const int64_t bytes = reader.next("a tensor map's swizzle", 0, 128);
  map.swizzle = bytes == 0 ? 0 : bytes == 32 ? 1 : bytes == 64 ? 2 : bytes == 128 ? 3 : -1;
  if (map.swizzle < 0) malformed("a tensor map's swizzle is " + std::to_string(bytes) + ", required 0, 32, 64 or 128");
  if (bytes && map.box[0] * element > bytes) {
    malformed("a tensor map's box is " + std::to_string(map.box[0] * element) + " bytes wide, its swizzle covers " +
              std::to_string(bytes));
  }
}

void check_map_memory(const TensorMap& map, int64_t element, const Extent& extent) {
  if (map.pointer.offset % 16 != 0 || !extent.aligned) {
    malformed("a tensor map's memory does not start at a multiple of 16 bytes");
  }
  __int128 end = static_cast<__int128>(map.sizes[0]) * element + map.pointer.offset;
  for (uint32_t i = 0; i + 1 < map.rank; ++i) end += static_cast<__int128>(map.sizes[i + 1] - 1) * map.strides[i];
  if (end > extent.bytes) {
    malformed("a tensor map ends beyond its tensor's " + std::to_string(extent.bytes) + " bytes");
  }
}

TensorMap read_tensor_map(WordReader& reader, const Extents& extents) {
  TensorMap map{};
  map.pointer = read_pointer(reader, &extents);
  const MapType& type = read_map_type(reader);
  map.type = type.type;
  const size_t box = read_sizes(reader, map);
  read_swizzle(reader, type.bytes, map);
  read_im2col(reader, map);
  check_box(map, box, type.bytes);
  check_map_memory(map, type.bytes, extent_of(extents, map.pointer));
  if (!Driver::get().cuTensorMapEncodeTiled || !Driver::get().cuTensorMapEncodeIm2col) {
    throw std::runtime_error("the CUDA driver is too old for tensor maps; CUDA 12.0 or newer is required");
  }
  return map;
}

// --- launches --------------------------------------------------------------------------------------------------------

constexpr int64_t kPointer = 0, kScalar = 1, kTensorMap = 2, kStruct = 3;  // indices of types in plan.py's Argument
constexpr int64_t kInt64 = 1, kFloat32Scalar = 2;  // numbers of Scalar.type; 0 is int32

// Reads a pointer or scalar into the launch's values, at the first multiple of its size from byte `at` on.  Returns the
// index of the byte after it.
size_t read_value(WordReader& reader, const Extents& extents, int64_t kind, size_t at, Launch& launch) {
  const bool is_small = kind == kScalar && reader.next("a scalar's type", 0, kFloat32Scalar) != kInt64;
  const size_t size = is_small ? 4 : 8;
  at = (at + size - 1) / size * size;
  launch.values.resize(at / 8 + 1);
  if (kind == kScalar) {
    const uint64_t bits = reader.bits("a scalar");
    std::memcpy(reinterpret_cast<char*>(launch.values.data()) + at, &bits, size);
  } else {
    launch.pointers.push_back({at / 8, read_pointer(reader, &extents)});
  }
  return at + size;
}

void read_argument(WordReader& reader, const Extents& extents, Launch& launch) {
  const int64_t kind = reader.next("an argument's kind", 0, kStruct);
  size_t at = launch.values.size() * 8;
  launch.starts.push_back(launch.values.size());
  if (kind == kTensorMap) {
    if (launch.maps.size() == kMaxTensorMaps) malformed("a launch has over 8 tensor maps");
    launch.maps.push_back({launch.starts.size() - 1, read_tensor_map(reader, extents)});
    launch.values.push_back(0);
  } else if (kind == kStruct) {
    const int64_t fields = reader.next("the number of a struct's fields", 1, kMaxArgumentWords);
    for (int64_t i = 0; i < fields; ++i) {
      const int64_t field = reader.next("a field's kind", kPointer, kScalar);
      at = read_value(reader, extents, field, at, launch);
    }
  } else {
    read_value(reader, extents, kind, at, launch);
  }
  if (launch.values.size() > kMaxArgumentWords) malformed("the arguments of a launch take over 4096 bytes");
}

Launch read_launch(WordReader& reader, const Extents& extents) {
  constexpr int64_t kGridX = std::numeric_limits<int32_t>::max();
  Launch launch;
  LaunchConfig& config = launch.config;
  config.function = reinterpret_cast<Function>(reader.bits("a function"));
  if (!config.function) malformed("a step has no function");
  config.grid = read_dim(reader, "a grid size", kGridX, 65535, 65535);
  config.block = read_dim(reader, "a block size", 1024, 1024, 64);
  if (uint64_t{config.block.x} * config.block.y * config.block.z > 1024) malformed("a block has over 1024 threads");
  const size_t arguments = reader.count("the number of arguments", kMaxArguments);
  for (size_t i = 0; i < arguments; ++i) read_argument(reader, extents, launch);
  config.shared = static_cast<uint32_t>(reader.next("shared memory", 0, 1 << 20));
  config.cluster = static_cast<uint32_t>(reader.next("a cluster size", 1, 16));
  if (config.grid.x % config.cluster != 0) malformed("the grid's width is not a multiple of the cluster's");
  config.pdl = reader.flag("whether a launch is a programmatic dependent one");
  return launch;
}

// --- products --------------------------------------------------------------------------------------------------------

DataType read_data_type(WordReader& reader) {
  const int64_t dtype = reader.next("a matrix's dtype", 1, 1000);
  if (dtype == 1) return kFloat32;
  if (dtype == 10) return kFloat16;
  if (dtype == 16) return kBfloat16;
  malformed("a matrix is of " + dtype_name(static_cast<int>(dtype)) + ", required float32, float16 or bfloat16");
}

void check_memory(const std::string& what, const Pointer& pointer, __int128 bytes, int64_t element, bool aligned,
                  const Extents* extents) {
  if (pointer.offset % static_cast<uint64_t>(element) != 0) {
    malformed(what + " starts at byte " + std::to_string(pointer.offset) + ", required a multiple of " +
              std::to_string(element));
  }
  if (!extents) return;
  const Extent& extent = extent_of(*extents, pointer);
  if (pointer.offset + bytes > extent.bytes) {
    malformed(what + " ends beyond its tensor's " + std::to_string(extent.bytes) + " bytes");
  }
  if (aligned && !extent.aligned) malformed(what + " is said to be aligned, but its tensor is not");
}

Matrix read_matrix(WordReader& reader, const Extents* extents) {
  Matrix matrix;
  matrix.pointer = read_pointer(reader, extents);
  matrix.type = read_data_type(reader);
  matrix.rows = reader.next("a matrix's rows", 1, kMaxBytes);
  matrix.columns = reader.next("a matrix's columns", 1, kMaxBytes);
  matrix.stride = reader.next("a matrix's stride", matrix.columns, kMaxBytes);
  matrix.batch_stride = reader.next("a matrix's batch stride", 0, kMaxBytes);
  return matrix;
}

void check_matrix(const char* name, const Matrix& matrix, int64_t rows, int64_t columns, const Matmul& matmul,
                  const Extents* extents) {
  const std::string what = std::string("the matrix ") + name;
  if (matrix.rows != rows || matrix.columns != columns) {
    malformed(what + " is " + std::to_string(matrix.rows) + "x" + std::to_string(matrix.columns) + ", required " +
              std::to_string(rows) + "x" + std::to_string(columns));
  }
  const int64_t element = matrix.type == kFloat32 ? 4 : 2;
  const __int128 elements = static_cast<__int128>(matmul.batch - 1) * matrix.batch_stride +
                            static_cast<__int128>(rows - 1) * matrix.stride + columns;
  check_memory(what, matrix.pointer, elements * element, element, matmul.aligned, extents);
}

void check_matrices(const Matmul& matmul, const Extents* extents) {
  const int64_t m = matmul.x.rows, k = matmul.x.columns;
  const int64_t n = matmul.transposed ? matmul.w.rows : matmul.w.columns;
  check_matrix("x", matmul.x, m, k, matmul, extents);
  check_matrix("w", matmul.w, matmul.transposed ? n : k, matmul.transposed ? k : n, matmul, extents);
  check_matrix("y", matmul.y, m, n, matmul, extents);
  if (matmul.has_c) check_matrix("c", matmul.c, m, n, matmul, extents);
  if (matmul.w.type != matmul.x.type) malformed("the matrices x and w are of different dtypes");
  if (matmul.y.type != matmul.x.type && matmul.y.type != kFloat32) {
    malformed("the matrix y is neither of x's dtype nor float32");
  }
  if (matmul.has_c && matmul.c.type != matmul.y.type) malformed("the matrices c and y are of different dtypes");
  if (matmul.batch > 1 && matmul.y.batch_stride == 0) malformed("the products of a batch are written to one address");
  if (matmul.y.pointer.kind == MemoryKind::kInput) malformed("the matrix y is an input");
}

void check_bias(const Matmul& matmul, const Extents* extents) {
  const int64_t element = matmul.y.type == kFloat32 ? 4 : 2;
  check_memory("the bias", matmul.bias, static_cast<__int128>(matmul.y.columns) * element, element, matmul.aligned,
               extents);
}

// Reads the workspace of a Matmul or a Convolution.
template <class LibraryCall>
void read_workspace(WordReader& reader, const Extents* extents, LibraryCall& call) {
  call.has_workspace = reader.flag("whether there is a workspace");
  if (call.has_workspace) call.workspace = read_pointer(reader, extents);
  call.workspace_bytes = static_cast<uint64_t>(reader.next("a workspace's size", 0, kMaxBytes));
  if (!call.has_workspace) {
    if (call.workspace_bytes && extents) malformed("a workspace has a size, but no pointer");
    return;
  }
  if (call.workspace.kind != MemoryKind::kScratch || call.workspace.offset % kScratchAlignment != 0) {
    malformed("a workspace must be scratch memory from a multiple of 256 bytes on");
  }
  check_memory("the workspace", call.workspace, call.workspace_bytes, 1, false, extents);
}

// --- convolutions ----------------------------------------------------------------------------------------------------

constexpr int64_t kMaxAxes = 3;
constexpr int64_t kMaxConvolutionSize = int64_t{1} << 31;  // the limit of an axis's size

CudnnDataType read_cudnn_type(WordReader& reader) {
  const int64_t dtype = reader.next("a convolution's dtype", 1, 1000);
  if (dtype == 1) return kCudnnFloat32;
  if (dtype == 10) return kCudnnFloat16;
  if (dtype == 16) return kCudnnBfloat16;
  malformed("a convolution is of " + dtype_name(static_cast<int>(dtype)) + ", required float32, float16 or bfloat16");
}

void read_axes(WordReader& reader, Convolution& conv) {
  const auto read = [&](const char* what, int64_t low, std::vector<int64_t>& values) {
    values.resize(static_cast<size_t>(reader.next("the number of a convolution's spatial axes", 1, kMaxAxes)));
    if (values.size() != conv.sizes.size()) {
      malformed("a convolution of " + std::to_string(conv.sizes.size()) + " spatial axes has " +
                std::to_string(values.size()) + " of " + what);
    }
    for (int64_t& value : values) value = reader.next(what, low, kMaxConvolutionSize);
  };
  read("a convolution's size", 1, conv.sizes);
  read("a convolution's output size", 1, conv.y_sizes);
  read("a filter's size", 1, conv.kernel);
  read("a convolution's stride", 1, conv.strides);
  read("a convolution's dilation", 1, conv.dilations);
  read("a convolution's padding", 0, conv.pads_begin);
  read("a convolution's padding", 0, conv.pads_end);
}

// The sizes of y follow from the sizes of x; in a transposed convolution, the sizes of x follow from the sizes of y.
void check_axes(const Convolution& conv) {
  const auto& from = conv.transposed ? conv.y_sizes : conv.sizes;
  const auto& to = conv.transposed ? conv.sizes : conv.y_sizes;
  for (size_t i = 0; i < from.size(); ++i) {
    const int64_t filter = (conv.kernel[i] - 1) * conv.dilations[i] + 1;
    const int64_t padded = from[i] + conv.pads_begin[i] + conv.pads_end[i];
    const int64_t size = padded < filter ? 0 : (padded - filter) / conv.strides[i] + 1;
    if (size != to[i]) {
      malformed("a convolution's size of axis " + std::to_string(i) + " is " + std::to_string(to[i]) + ", required " +
                std::to_string(size));
    }
  }
  if (conv.c % conv.group != 0 || conv.m % conv.group != 0) {
    malformed("a convolution of " + std::to_string(conv.c) + " and " + std::to_string(conv.m) +
              " channels cannot have " + std::to_string(conv.group) + " groups");
  }
}

float read_number(WordReader& reader, const char* what) {
  const auto bits = static_cast<uint32_t>(reader.next(what, 0, std::numeric_limits<uint32_t>::max()));
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

void read_engine(WordReader& reader, Convolution& conv) {
  conv.engine.resize(reader.count("the number of an engine's words", kMaxEngineWords));
  if (!conv.engine.empty() && conv.engine.size() % 2 == 0) malformed("a knob of an engine has no value");
  for (size_t i = 0; i < conv.engine.size(); ++i) {
    const bool is_value = i > 0 && i % 2 == 0;  // words: the engine's index, then a type and a value per knob
    constexpr int64_t kMaxNumber = std::numeric_limits<int32_t>::max();
    conv.engine[i] = is_value ? static_cast<int64_t>(reader.bits("a knob's value"))
                              : reader.next("an engine's index or a knob's type", 0, kMaxNumber);
  }
}

__int128 elements_of(const std::vector<int64_t>& spatial, int64_t first, int64_t second) {
  __int128 count = static_cast<__int128>(first) * second;
  for (const int64_t size : spatial) {
    if (count > kMaxBytes) return count;  // too large for any tensor already
    count *= size;
  }
  return count;
}

void check_operands(const Convolution& conv, const Extents* extents) {
  const int64_t element = conv.element_bytes();
  const auto check = [&](const char* what, const Pointer& pointer, __int128 count) {
    check_memory(what, pointer, count * element, element, conv.aligned, extents);
  };
  const __int128 y = elements_of(conv.y_sizes, conv.n, conv.m);
  check("the convolution's x", conv.x, elements_of(conv.sizes, conv.n, conv.c));
  check("the convolution's w", conv.w, elements_of(conv.kernel, conv.m, conv.c / conv.group));
  check("the convolution's y", conv.y, y);
  if (conv.has_bias) check("the bias", conv.bias, conv.m);
  if (conv.has_residual) check("the residual", conv.residual, y);
  if (conv.y.kind == MemoryKind::kInput) malformed("the convolution's y is an input");
}

}  // namespace

Matmul read_matmul(WordReader& reader, const Extents* extents) {
  Matmul matmul;
  matmul.x = read_matrix(reader, extents);
  matmul.w = read_matrix(reader, extents);
  matmul.y = read_matrix(reader, extents);
  matmul.transposed = reader.flag("whether w is transposed");
  matmul.batch = static_cast<int32_t>(reader.next("a batch", 1, std::numeric_limits<int32_t>::max()));
  matmul.has_c = reader.flag("whether there is a c");
  if (matmul.has_c) matmul.c = read_matrix(reader, extents);
  matmul.has_bias = reader.flag("whether there is a bias");
  if (matmul.has_bias) matmul.bias = read_pointer(reader, extents);
  matmul.activation = static_cast<Activation>(reader.next("an activation", 0, 2));
  matmul.tf32 = reader.flag("whether TF32 is allowed");
  matmul.aligned = reader.flag("whether matrices are aligned");
  read_workspace(reader, extents, matmul);
  const size_t words = reader.count("the number of an algorithm's words");
  matmul.has_algorithm = words > 0;
  if (matmul.has_algorithm && words != std::size(matmul.algorithm.words)) {
    malformed("a matmul's algorithm has 8 words or none, found " + std::to_string(words));
  }
  for (size_t i = 0; i < words; ++i) matmul.algorithm.words[i] = reader.bits("an algorithm's word");
  check_matrices(matmul, extents);
  if (matmul.has_bias) check_bias(matmul, extents);
  return matmul;
}

Convolution read_convolution(WordReader& reader, const Extents* extents) {
  Convolution conv;
  conv.n = reader.next("a convolution's batch", 1, kMaxConvolutionSize);
  conv.c = reader.next("a convolution's channels", 1, kMaxConvolutionSize);
  conv.m = reader.next("a convolution's channels", 1, kMaxConvolutionSize);
  read_axes(reader, conv);
  conv.group = reader.next("a convolution's groups", 1, kMaxConvolutionSize);
  conv.type = read_cudnn_type(reader);
  conv.x = read_pointer(reader, extents);
  conv.w = read_pointer(reader, extents);
  conv.y = read_pointer(reader, extents);
  conv.has_bias = reader.flag("whether there is a bias");
  if (conv.has_bias) conv.bias = read_pointer(reader, extents);
  conv.has_residual = reader.flag("whether there is a residual");
  if (conv.has_residual) conv.residual = read_pointer(reader, extents);
  conv.residual_first = reader.flag("whether the residual is added before the activation");
  conv.activation = static_cast<ConvolutionActivation>(reader.next("an activation", 0, 11));
  conv.alpha = read_number(reader, "an activation's alpha");
  conv.beta = read_number(reader, "an activation's beta");
  conv.channels_last = reader.flag("whether channels are last");
  conv.w_channels_last = reader.flag("whether channels of w are last");
  conv.transposed = reader.flag("whether a convolution is transposed");
  conv.tf32 = reader.flag("whether TF32 is allowed");
  conv.aligned = reader.flag("whether operands are aligned");
  read_workspace(reader, extents, conv);
  read_engine(reader, conv);
  check_axes(conv);
  check_operands(conv, extents);
  return conv;
}

Step read_step(WordReader& reader, const Extents& extents, int device) {
  const int64_t kind = reader.next("a step's kind", 0, 2);
  if (kind == 0) return read_launch(reader, extents);
  if (kind == 2) return CudnnConvolution::make(read_convolution(reader, &extents), device);
  return std::make_unique<const CublasMatmul>(CublasMatmul::make(read_matmul(reader, &extents), device));
}

}  // namespace onnxfuse
