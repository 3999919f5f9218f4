// Copies and products of quantized_matmul.cu on a CPU, in place of gemm_multiply.cuh. Included after blocks_emulated.h
// and attention_mma_emulated.h, whose shared memory begins at address 0.
using i64 = long long;

static u32 shared_address(const void* pointer) { return u32(static_cast<const char*>(pointer) - emulated::memory()); }

// A copy happens at once: at the earliest possible time.
template <int BYTES>
static void copy_async(u32 to, const char* from, int read) {
    if (to % BYTES || (read && (read != BYTES || reinterpret_cast<u64>(from) % BYTES))) abort();
    if (to + BYTES > emulated::memory_bytes()) abort();
    if (read) memcpy(emulated::memory() + to, from, BYTES);
    else memset(emulated::memory() + to, 0, BYTES);
}
static void commit_copies() {}
template <int PENDING>
static void wait_for_groups() {}
static void store_chunk(u32 to, const u32 (&words)[4]) { store_shared<16>(to, words); }

static void multiply(f16 type, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(type, c, a, b0, b1); }

#if !FLOAT8
// Products of bytes, m16n8k32.
static void multiply_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1}, lane = emulated::lane();
    u32 words[6][32];
    for (int i = 0; i < 6; ++i) {
        memcpy(words[i], emulated::exchange(own[i]), sizeof(words[i]));
        emulated::wait(emulated::Wait::Warp);
    }
    for (u32 i = 0; i < 4; ++i)
        for (u32 word = 0; word < 8; ++word) {
            const u32 left = words[i / 2 + word / 4 * 2][lane / 4 * 4 + word % 4];
            const u32 right = words[4 + word / 4][(lane % 4 * 2 + i % 2) * 4 + word % 4];
            for (int byte = 0; byte < 32; byte += 8) c[i] += int(X_T(left >> byte)) * int(W_T(right >> byte));
        }
}
#endif
