// Shared memory, votes, shuffles and products of attention_mma.cuh on a CPU, in place of its own functions of these
// names. Included after blocks_emulated.h.
static u32 shared_base() { return 0; }

template <class T>
static T shared_at(u32 from) {
    if (from % sizeof(T) || from + sizeof(T) > emulated::memory_bytes()) abort();
    T value;
    memcpy(&value, emulated::memory() + from, sizeof(T));
    return value;
}
static float shared_float(u32 from) { return shared_at<float>(from); }
static float2 shared_float2(u32 from) { return shared_at<float2>(from); }
static float4 shared_float4(u32 from) { return shared_at<float4>(from); }

static u32 load_byte(const void* from) { return *static_cast<const unsigned char*>(from); }
static void store_shared(u32 to, float value) { memcpy(emulated::memory() + to, &value, 4); }
template <int BYTES>
static void store_shared(u32 to, const u32* words) {
    if (to % min(BYTES, 16)) abort();  // misaligned
    memcpy(emulated::memory() + to, words, BYTES);
}

template <int BYTES>
static void load_shared(u32 from, u32* words) {
    if (from % min(BYTES, 16)) abort();  // misaligned
    memcpy(words, emulated::memory() + from, BYTES);
}
template <bool LEAVING, int BYTES>
static void store_bytes(char* to, const u32* words) {
    if (reinterpret_cast<u64>(to) % min(BYTES, 16)) abort();
    memcpy(to, words, BYTES);
}

template <class T>
static T __shfl_sync(unsigned, T value, int lane) {
    const u32 other = emulated::exchange(bits_as<u32>(value))[lane];
    emulated::wait(emulated::Wait::Warp);
    return bits_as<T>(other);
}

static bool __all_sync(unsigned, bool holds) {
    const u32* all = emulated::exchange(holds);
    for (int i = 0; i < 32; ++i) holds &= all[i] != 0;
    emulated::wait(emulated::Wait::Warp);
    return holds;
}

template <bool TRANSPOSED>
static void load_matrices(u32 (&to)[4], u32 from) {
    const u32 lane = emulated::lane();
    u32 addresses[32];
    memcpy(addresses, emulated::exchange(from), sizeof(addresses));
    emulated::wait(emulated::Wait::Warp);
    for (u32 i = 0; i < 4; ++i)
        for (u32 half = 0; half < 2; ++half) {
            const u32 first = lane / 4, second = lane % 4 * 2 + half;  // row and column, or the opposite
            const u32 at = addresses[i * 8 + (TRANSPOSED ? second : first)] + (TRANSPOSED ? first : second) * 2;
            to[i] = to[i] & ~(0xffffu << 16 * half) | u32(shared_at<unsigned short>(at)) << 16 * half;
        }
}

static u32 transposed(u32 pair) {
    const u32 *all = emulated::exchange(pair), lane = emulated::lane();
    u32 result = 0;
    for (u32 half = 0; half < 2; ++half)
        result |= (all[(lane % 4 * 2 + half) * 4 + lane / 8] >> lane / 4 % 2 * 16 & 0xffffu) << 16 * half;
    emulated::wait(emulated::Wait::Warp);
    return result;
}

// Products of fp16 and bf16, m16n8k16, and of fp32, m16n8k8.
template <class T>
static void mma(T type, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1}, lane = emulated::lane();
    u32 words[6][32];
    for (int i = 0; i < 6; ++i) {
        memcpy(words[i], emulated::exchange(own[i]), sizeof(words[i]));
        emulated::wait(emulated::Wait::Warp);
    }
    for (u32 i = 0; i < 4; ++i)
        for (u32 word = 0; word < 8; ++word) {
            float left[2] = {}, right[2] = {};
            widen(type, words[i / 2 + word / 4 * 2][lane / 4 * 4 + word % 4], left);
            widen(type, words[4 + word / 4][(lane % 4 * 2 + i % 2) * 4 + word % 4], right);
            c[i] += left[0] * right[0] + left[1] * right[1];
        }
}

static void __syncwarp() { emulated::wait(emulated::Wait::Warp); }
static int __syncthreads_or(int) { abort(); }  // of a second pass
