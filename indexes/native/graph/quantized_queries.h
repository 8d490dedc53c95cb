// Queries as bytes, to score codes with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "graph.h"

namespace kvdb::indexes::graph {

// q.k of a key low + step * code is estimated as bias + factor * (code . bytes).
struct QuantizedQueries {
    std::vector<std::int8_t> bytes;  // [rows][stride]
    std::vector<float> factor, bias, noise, highest;

    // noise: three standard deviations of an estimate. highest: no key within the codes' range has
    // a larger q.k.
    void resize(std::int64_t rows, std::int64_t stride) {
        bytes.assign(rows * stride, 0);
        for (auto* each : {&factor, &bias, &noise, &highest}) each->assign(rows, 0);
    }

    // Sets row `row` from a query. The residual of the weights after quantizing goes to `rest`,
    // [head_dim].
    void quantize(std::int64_t row, const Graph& graph, int kv_head, const float* q, float* rest) {
        const float* low = graph.low + std::int64_t{kv_head} * graph.head_dim;
        const float* step = graph.step + std::int64_t{kv_head} * graph.head_dim;
        double offset = 0, variance = 0, most = 0;
        for (int i = 0; i < graph.head_dim; ++i) {
            rest[i] = q[i] * step[i];
            offset += double{q[i]} * (low[i] + kMiddle * double{step[i]});
            variance += double{rest[i]} * rest[i];
            most += double{q[i]} * low[i] + std::max(0.0, 255 * double{rest[i]});
        }
        quantize_weights(row, graph, rest);
        const double rounding = double{factor[row]} * factor[row] * graph.head_dim;
        noise[row] = static_cast<float>(
            3 * std::sqrt((variance + rounding * kCodeSpread * kCodeSpread) / 12));
        bias[row] += static_cast<float>(offset);
        highest[row] = static_cast<float>(most);
    }

    // Sets bytes from the weights of the codes; the weights become their residual. The bias is
    // chosen so that the residual adds nothing for a code in the middle.
    void quantize_weights(std::int64_t row, const Graph& graph, float* weights) {
        float largest = 0;
        for (int i = 0; i < graph.head_dim; ++i) largest = std::max(largest, std::fabs(weights[i]));
        const float unit = largest / 127;
        std::int8_t* to = bytes.data() + row * graph.stride;
        std::int64_t sum = 0;
        for (int i = 0; unit > 0 && i < graph.head_dim; ++i) {
            const float rounding = 0x1.8p23f;  // adding it rounds to the nearest integer
            const float rounded = weights[i] / unit + rounding - rounding;
            to[i] = static_cast<std::int8_t>(rounded);
            sum += to[i];
            weights[i] -= rounded * unit;
        }
        factor[row] = unit;
        bias[row] = static_cast<float>(-kMiddle * double{unit} * static_cast<double>(sum));
    }

    static constexpr double kMiddle = 128;
    static constexpr double kCodeSpread = 40;  // a code's usual distance from the middle
};

}  // namespace kvdb::indexes::graph
