// Writing codes of keys and values, and checking them.
#pragma once

#include "kernels.h"

namespace kvdb::indexes::quantized {

// Codes the tokens from the chunk on that holds token `coded`. What is kept of a chunk depends on
// its tokens alone, not on how many came at a time.
void insert(const Blocks& blocks, const Codes& codes, std::int64_t coded);

// How many chunks of a KV head are not what their keys and values make of them.
std::int64_t verify(const Blocks& blocks, const Codes& codes);

}  // namespace kvdb::indexes::quantized
