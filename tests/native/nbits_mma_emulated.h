// What nbits_mma.cu needs beside conv_mma_emulated.h, which is included before: its own functions of these names, whose
// instructions a CPU does not have.

template <class T>
T __ldg(const T* from) {
    emulated::check(from, sizeof(T));
    return *from;
}

template <int BYTES>
void store_shared(unsigned to, unsigned bits) {
    emulated::check_shared(emulated::memory + to, BYTES);
    memcpy(emulated::memory + to, &bits, BYTES);
}

template <int BYTES>
unsigned load_shared(unsigned from) {
    unsigned bits = 0;
    emulated::check_shared(emulated::memory + from, BYTES);
    memcpy(&bits, emulated::memory + from, BYTES);
    return bits;
}
