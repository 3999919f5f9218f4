// Shared memory, votes and shuffles of attention_mma.cuh on a CPU, in place of its own functions of these names; for
// products in float32. Included after blocks_emulated.h.
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

static void __syncwarp() { emulated::wait(emulated::Wait::Warp); }
static int __syncthreads_or(int) { abort(); }  // of a second pass
