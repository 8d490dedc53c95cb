// The table of everything that one instruction set provides to the drivers.
#pragma once

#include <type_traits>

#include "copy.h"
#include "decode.h"
#include "decode_quantized.h"
#include "decode_tiles.h"
#include "finish.h"
#include "prefill.h"
#include "quantize.h"
#include "retrieved.h"
#include "rotate.h"
#include "scores.h"

namespace kvdb::kernels {

template <class Isa>
struct Table {
    template <class T>
    static void decode(const AttendItem& item) {
        if constexpr (Isa::has_tiles && std::is_same_v<T, BFloat16>) {
            if (DecodeTiles<Isa>::takes(item.geometry)) return DecodeTiles<Isa>::run(item);
        }
        Decode<Isa, T>::run(item);
    }
    template <class T>
    static void prefill(const AttendItem& item) {
        Prefill<Isa, T>::run(item);
    }
    static std::size_t decode_scratch_bytes(const Geometry& geometry, int heads,
                                            std::int64_t rows) {
        std::size_t floats = Decode<Isa, float>::scratch_floats(geometry, heads, rows);
        if constexpr (Isa::has_tiles) {
            const std::size_t tiled = DecodeTiles<Isa>::scratch_floats(geometry, heads);
            if (tiled > floats) floats = tiled;
        }
        return sizeof(float) * floats;
    }
    static std::size_t prefill_scratch_bytes(const Geometry& geometry, std::int64_t rows) {
        const std::size_t halves = Prefill<Isa, BFloat16>::scratch_floats(geometry, rows);
        const std::size_t floats = Prefill<Isa, float>::scratch_floats(geometry, rows);
        return sizeof(float) * (halves > floats ? halves : floats);
    }

    static std::size_t score_scratch_bytes(const Geometry& geometry, std::int64_t rows) {
        const std::size_t halves = Scores<Isa, BFloat16>::scratch_floats(geometry, rows);
        const std::size_t floats = Scores<Isa, float>::scratch_floats(geometry, rows);
        return sizeof(float) * (halves > floats ? halves : floats);
    }

    static constexpr Kernels kernels{
        .decode = {decode<float>, decode<Float16>, decode<BFloat16>},
        .prefill = {prefill<float>, prefill<Float16>, prefill<BFloat16>},
        .decode_scratch_bytes = decode_scratch_bytes,
        .prefill_scratch_bytes = prefill_scratch_bytes,
        .decode_quantized = {DecodeQuantized<Isa, 8, 8>::run, DecodeQuantized<Isa, 8, 4>::run,
                             DecodeQuantized<Isa, 4, 4>::run},
        .quantized_scratch_bytes = DecodeQuantized<Isa, 8, 8>::scratch_bytes,
        .finish = Finish<Isa>::run,
        .retrieved = {Retrieved<Isa, float>::run, Retrieved<Isa, Float16>::run,
                      Retrieved<Isa, BFloat16>::run},
        .score = {Scores<Isa, float>::run, Scores<Isa, Float16>::run, Scores<Isa, BFloat16>::run},
        .score_scratch_bytes = score_scratch_bytes,
        .rotate = {Rotate<Isa, float>::run, Rotate<Isa, Float16>::run, Rotate<Isa, BFloat16>::run},
        .quantize = {Quantize<Isa, float>::encode, Quantize<Isa, Float16>::encode,
                     Quantize<Isa, BFloat16>::encode},
        .quantize_scratch_bytes = Quantize<Isa, float>::scratch_bytes,
        .dequantize = {Quantize<Isa, float>::decode, Quantize<Isa, Float16>::decode,
                       Quantize<Isa, BFloat16>::decode},
        .copy = Copy<Isa>::plain,
        .copy_finite = {Copy<Isa>::finite_float32, Copy<Isa>::finite_float16,
                        Copy<Isa>::finite_bfloat16},
        .read = Copy<Isa>::read,
    };
};

}  // namespace kvdb::kernels
