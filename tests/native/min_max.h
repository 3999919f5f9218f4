// CUDA's min and max. Headers of the standard library that have them take long to read.
#pragma once

template <class A, class B>
constexpr auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
constexpr auto max(A a, B b) { return a < b ? b : a; }
