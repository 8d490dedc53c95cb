#pragma once
#include "decode.h"
namespace kvdb::kernels {
template <class Isa, class T> struct Prefill : Decode<Isa, T> {
    static std::size_t scratch_floats(int head_dim, std::int64_t rows) { return Decode<Isa,T>::scratch_floats(head_dim,1,rows); }
};
}
