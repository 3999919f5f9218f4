// The instruction that picks four of the eight bytes of two words.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned d = 0;
    for (int i = 0; i < 4; ++i) d |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return d;
}
