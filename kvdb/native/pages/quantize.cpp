#include "quantize.h"

#include <cstring>
#include <mutex>

#include "span.h"
#include "workspace.h"

namespace kvdb {

void check_format(const Geometry& geometry, BlockFormat format) {
    if (format == BlockFormat::raw) return;
    if (!geometry.symmetric() || geometry.head_dim > kQuantizedDimMax) {
        throw std::invalid_argument(
            "keys have " + std::to_string(geometry.head_dim) + " numbers and values " +
            std::to_string(geometry.value_dim) + (geometry.values_in_keys ? ", in the keys" : "") +
            "; quantized blocks hold keys and values of as many, " +
            std::to_string(kQuantizedDimMax) + " at most, apart from each other");
    }
    if (geometry.block_size % kQuantizedGroup != 0) {
        throw std::invalid_argument("block_size is " + std::to_string(geometry.block_size) +
                                    "; quantized blocks hold a multiple of " +
                                    std::to_string(kQuantizedGroup) + " tokens");
    }
}

QuantizationError quantize(const Geometry& geometry, BlockFormat format, const Table& from,
                           std::int64_t n, const Table& to) {
    check_format(geometry, format);
    check_range(geometry, from, 0, n, "quantize: source");
    check_range(geometry, to, 0, n, "quantize: target");
    const Kernels& kernels = current_kernels();
    const QuantizeKernel kernel = kernels.quantize[static_cast<int>(geometry.dtype)];
    const QuantizedHead head_layout(geometry, key_bits(format), value_bits(format));
    const std::int64_t blocks = blocks_touched(0, n, geometry.block_size);
    QuantizationError all{};
    std::mutex adding;
    for_each(blocks, payload_bytes(geometry, n), [&](std::int64_t block) {
        const Span span = span_in_block(0, n, geometry.block_size, block);
        QuantizationError part{};
        auto* scratch = reinterpret_cast<float*>(
            Workspace::of_this_thread().reserve(kernels.quantize_scratch_bytes(geometry)));
        for (int head = 0; head < geometry.kv_heads; ++head) {
            kernel({
                .geometry = geometry,
                .key_bits = key_bits(format),
                .value_bits = value_bits(format),
                .keys = block_rows(geometry, from, span, head, Plane::key),
                .values = block_rows(geometry, from, span, head, Plane::value),
                .tokens = static_cast<int>(span.tokens),
                .to = reinterpret_cast<std::byte*>(to.blocks[block]) + head * head_layout.bytes,
                .scratch = scratch,
                .error = part.error,
                .norm = part.norm,
            });
        }
        const std::lock_guard lock(adding);
        for (int plane = 0; plane < 2; ++plane) {
            all.error[plane] += part.error[plane];
            all.norm[plane] += part.norm[plane];
        }
    });
    return all;
}

void dequantize(const Geometry& geometry, BlockFormat format, const Table& from, std::int64_t start,
                std::int64_t n, const Rows& keys, const Rows& values) {
    check_format(geometry, format);
    check_range(geometry, from, start, n, "dequantize");
    const DequantizeKernel kernel = current_kernels().dequantize[static_cast<int>(geometry.dtype)];
    const QuantizedHead head_layout(geometry, key_bits(format), value_bits(format));
    const auto element = static_cast<std::int64_t>(geometry.element_bytes());
    for_each(blocks_touched(start, n, geometry.block_size), payload_bytes(geometry, n),
             [&](std::int64_t index) {
                 const Span span = span_in_block(start, n, geometry.block_size, index);
                 const auto* block = reinterpret_cast<const std::byte*>(from.blocks[span.block]);
                 for (int head = 0; head < geometry.kv_heads; ++head) {
                     kernel({
                         .geometry = geometry,
                         .key_bits = key_bits(format),
                         .value_bits = value_bits(format),
                         .from = block + head * head_layout.bytes,
                         .begin = static_cast<int>(span.slot),
                         .end = static_cast<int>(span.slot + span.tokens),
                         .keys = array_rows(geometry, keys, span.offset, head),
                         .values = array_rows(geometry, values, span.offset, head),
                         .key_stride = keys.token_stride * element,
                         .value_stride = values.token_stride * element,
                     });
                 }
             });
}

void cut(const Geometry& geometry, BlockFormat format, const std::byte* from, int n,
         std::byte* to) {
    check_format(geometry, format);
    const QuantizedHead layout(geometry, key_bits(format), value_bits(format));
    const std::size_t key_lanes = geometry.head_dim * key_bits(format) / 8 / 4;  // of four bytes
    std::memcpy(to, from, geometry.kv_heads * layout.bytes);
    for (int head = 0; head < geometry.kv_heads; ++head, to += layout.bytes) {
        for (int token = n; token < geometry.block_size; ++token) {
            std::byte* keys = to + token / 16 * (key_lanes * 64) + token % 16 * 4;
            for (std::size_t lane = 0; lane < key_lanes; ++lane) {
                std::memset(keys + lane * 64, 0, 4);
            }
            const int halves = 8 / value_bits(format);  // of a byte, one token each
            const int group = token / 4;
            std::byte* values =
                to + layout.values + group / halves * geometry.head_dim * 4 + token % 4;
            const std::byte keep{static_cast<unsigned char>(halves == 1 ? 0x00
                                                            : group % 2 ? 0x0F
                                                                        : 0xF0)};
            for (int channel = 0; channel < geometry.head_dim; ++channel)
                values[channel * 4] &= keep;
            std::memset(to + layout.key_scales + 2 * token, 0, 2);
            std::memset(to + layout.value_scales + 2 * token, 0, 2);
        }
    }
}

std::int64_t payload_bytes(const Geometry& geometry, const Run& run) {
    std::int64_t tokens[kQuantizedFormats + 1] = {};
    for (std::int64_t b = 0; b < run.blocks; ++b) {
        tokens[run.table[b] & kFormatMask] += run.counts[b];
    }
    std::int64_t bytes = 0;
    for (int format = 0; format <= kQuantizedFormats; ++format) {
        const auto block =
            static_cast<std::int64_t>(block_bytes(geometry, static_cast<BlockFormat>(format)));
        bytes += tokens[format] * block / geometry.block_size;
    }
    return bytes;
}

std::int64_t value_bytes(const Geometry& geometry, BlockFormat format) {
    if (format == BlockFormat::raw) {
        return static_cast<std::int64_t>(geometry.kv_heads * geometry.value_row_bytes());
    }
    const BlockFormat alike = format == BlockFormat::int8_int4 ? BlockFormat::int4 : format;
    return static_cast<std::int64_t>(block_bytes(geometry, alike)) / (2 * geometry.block_size);
}

}  // namespace kvdb
