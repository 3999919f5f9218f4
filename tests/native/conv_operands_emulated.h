// What conv_operands.cuh needs of gemm_hopper.cuh and hopper.cuh: the constants of a stage, and loads that are recorded
// instead of being carried out. TILE_M, TILE_N and K_BLOCK are macros.
#include <algorithm>
#include <vector>

#define __device__
#define __forceinline__ inline

using std::min;
using u32 = unsigned;
struct int2 { int x, y; };
struct TensorMap { bool of_pixels; };

constexpr int BLOCKS = 64 / K_BLOCK, BLOCK_ROW_BYTES = 2 * K_BLOCK, X_BYTES = TILE_M * 128;

// Each load is 10 numbers: whether it walks over pixels, where it goes, five coordinates from the innermost one on, and
// three offsets; what a load has not is 0.
static std::vector<int> records;

namespace hopper {

inline void record(const TensorMap& map, bool walks, u32 to, std::vector<int> at, std::vector<int> offsets) {
    at.resize(5);
    offsets.resize(3);
    records.push_back(map.of_pixels == walks ? walks : -1);
    records.push_back(int(to));
    records.insert(records.end(), at.begin(), at.end());
    records.insert(records.end(), offsets.begin(), offsets.end());
}

inline void load_im2col(const TensorMap& map, u32 to, u32, int c, int w, int n, unsigned short by_w) {
    record(map, true, to, {c, w, n}, {by_w});
}
inline void load_im2col(const TensorMap& map, u32 to, u32, int c, int w, int h, int n, unsigned short by_w,
                        unsigned short by_h) {
    record(map, true, to, {c, w, h, n}, {by_w, by_h});
}
inline void load_im2col(const TensorMap& map, u32 to, u32, int c, int w, int h, int d, int n, unsigned short by_w,
                        unsigned short by_h, unsigned short by_d) {
    record(map, true, to, {c, w, h, d, n}, {by_w, by_h, by_d});
}
inline void load(const TensorMap& map, u32 to, u32, int c0, int c1, int c2) { record(map, false, to, {c0, c1, c2}, {}); }

}  // namespace hopper
