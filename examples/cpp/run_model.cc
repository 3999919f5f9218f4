// Runs a fused model in C++, and prints its outputs and how long the first answer and later ones take.
//
//   run_model fused.onnx ids=8x128 mask=8x128                       the nodes' bodies, on the CPU
//   run_model fused.onnx ids=8x128 mask=8x128 cuda                  the same on a GPU
//   run_model fused.onnx ids=8x128 mask=8x128 cuda libonnxfuse.so onnxfuse.plans=fused.plans      CUDA kernels
//
// Every input is given its shape, and is filled with numbers from a fixed pattern.
#include <chrono>
#include <map>
#include <sstream>
#include <vector>

#include "elements.h"

const Ort ort;

void check(OrtStatus* status) {
  if (status) fail(ort.GetErrorMessage(status));
}

OrtValue* make_input(OrtSession* session, size_t index, const std::string& sizes, OrtAllocator* allocator) {
  OrtTypeInfo* type_info = nullptr;
  const OrtTensorTypeAndShapeInfo* info = nullptr;
  OrtValue* value = nullptr;
  void* data = nullptr;
  int type = 0;
  std::vector<int64_t> shape;
  std::istringstream words(sizes);
  for (std::string size; std::getline(words, size, 'x');) shape.push_back(std::atoll(size.c_str()));
  check(ort.SessionGetInputTypeInfo(session, index, &type_info));
  check(ort.CastTypeInfoToTensorInfo(type_info, &info));
  check(ort.GetTensorElementType(info, &type));
  check(ort.CreateTensorAsOrtValue(allocator, shape.data(), shape.size(), type, &value));
  check(ort.GetTensorMutableData(value, &data));
  size_t count = 1;
  for (const int64_t size : shape) count *= static_cast<size_t>(size);
  fill(data, count, type);
  return value;
}

void print(const char* name, OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  size_t rank = 0, count = 0;
  int type = 0;
  void* data = nullptr;
  check(ort.GetTensorTypeAndShape(value, &info));
  check(ort.GetTensorElementType(info, &type));
  check(ort.GetTensorShapeElementCount(info, &count));
  check(ort.GetDimensionsCount(info, &rank));
  std::vector<int64_t> shape(rank);
  check(ort.GetDimensions(info, shape.data(), rank));
  check(ort.GetTensorMutableData(value, &data));
  std::printf("%s [", name);
  for (size_t i = 0; i < rank; ++i) std::printf(i ? ", %lld" : "%lld", static_cast<long long>(shape[i]));
  std::printf("]:");
  for (size_t i = 0; i < std::min<size_t>(count, 6); ++i) std::printf(" %g", element(data, i, type));
  std::printf("\n");
  ort.ReleaseTensorTypeAndShapeInfo(info);
}

struct Arguments {
  std::string model, library;
  std::map<std::string, std::string> shapes;
};

Arguments read_arguments(int argc, char** argv, OrtSessionOptions* options) {
  Arguments read;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i], name = word.substr(0, word.find('='));
    if (name != word && name.rfind("onnxfuse.", 0) == 0) {
      check(ort.AddSessionConfigEntry(options, name.c_str(), word.c_str() + name.size() + 1));
    } else if (name != word) {
      read.shapes[name] = word.substr(name.size() + 1);
    } else if (word == "cuda") {
      OrtCUDAProviderOptionsV2* cuda = nullptr;
      check(ort.CreateCUDAProviderOptions(&cuda));
      check(ort.SessionOptionsAppendExecutionProvider_CUDA_V2(options, cuda));
    } else {
      (read.model.empty() ? read.model : read.library) = word;
    }
  }
  return read;
}

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const auto milliseconds = [](Clock::time_point since) {
    return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
  };
  const auto start = Clock::now();
  if (!ort.CreateEnv) fail(std::string("onnxruntime ") + OrtGetApiBase()->GetVersionString() + " is too old");
  OrtEnv* env = nullptr;
  OrtSessionOptions* options = nullptr;
  OrtSession* session = nullptr;
  OrtAllocator* allocator = nullptr;
  check(ort.CreateEnv(kWarning, "run_model", &env));
  check(ort.CreateSessionOptions(&options));
  const Arguments read = read_arguments(argc, argv, options);
  // The library reads its config entries when it is registered.  Here it says what does not fit, such as the GPU.
  if (!read.library.empty()) check(ort.RegisterCustomOpsLibrary_V2(options, read.library.c_str()));
  check(ort.CreateSession(env, read.model.c_str(), options, &session));
  check(ort.GetAllocatorWithDefaultOptions(&allocator));

  size_t input_count = 0, output_count = 0;
  check(ort.SessionGetInputCount(session, &input_count));
  check(ort.SessionGetOutputCount(session, &output_count));
  std::vector<char*> names(input_count), output_names(output_count);
  std::vector<OrtValue*> inputs(input_count);
  for (size_t i = 0; i < input_count; ++i) {
    check(ort.SessionGetInputName(session, i, allocator, &names[i]));
    if (!read.shapes.count(names[i])) fail(std::string("give input '") + names[i] + "' a shape, such as 8x128");
    inputs[i] = make_input(session, i, read.shapes.at(names[i]), allocator);
  }
  for (size_t i = 0; i < output_count; ++i) check(ort.SessionGetOutputName(session, i, allocator, &output_names[i]));

  std::vector<double> times;
  for (int run = 0; run <= 20; ++run) {
    std::vector<OrtValue*> outputs(output_count, nullptr);
    const auto begin = Clock::now();
    check(ort.Run(session, nullptr, names.data(), inputs.data(), input_count, output_names.data(), output_count,
                  outputs.data()));
    if (run) times.push_back(milliseconds(begin));
    else std::printf("first answer after %.1f ms\n", milliseconds(start)), std::fflush(stdout);
    for (size_t i = 0; i < output_count; ++i) {
      if (!run) print(output_names[i], outputs[i]);
      ort.ReleaseValue(outputs[i]);
    }
  }
  std::sort(times.begin(), times.end());
  std::printf("later runs take %.3f ms in the median of %zu\n", times[times.size() / 2], times.size());
  ort.ReleaseSession(session);
}
