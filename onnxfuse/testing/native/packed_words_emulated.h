// The functions of packed_words.cuh on a CPU.
#pragma once
#include "types_emulated.h"

// Returns `operation` of the elements of words, each result rounded to T.
template <class T, class Operation>
u32 each_element(T type, Operation operation, u32 a, u32 b, u32 c = 0) {
    float first[2] = {}, second[2] = {}, third[2] = {};
    widen(type, a, first);
    widen(type, b, second);
    widen(type, c, third);
    const float results[2] = {operation(first[0], second[0], third[0]), operation(first[1], second[1], third[1])};
    return narrow(type, results);
}

template <class T>
u32 multiply_words(T type, u32 a, u32 b) {
    return each_element(type, [](float x, float y, float) { return x * y; }, a, b);
}

template <class T>
u32 subtract_words(T type, u32 a, u32 b) {
    return each_element(type, [](float x, float y, float) { return x - y; }, a, b);
}

template <class T>
u32 fused_words(T type, u32 a, u32 b, u32 c) {
    return each_element(type, [](float x, float y, float z) { return fmaf(x, y, z); }, a, b, c);
}

inline u32 masked_or(u32 bits, u32 mask, u32 lead) { return bits & mask | lead; }
