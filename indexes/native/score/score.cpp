#include "kernels.h"
#include "paged_memory.h"

namespace kvdb::indexes {
namespace {

int type_of(const Blocks& blocks) {
    return static_cast<int>(blocks.geometry.dtype);
}

}  // namespace

void score_tokens(const ScoreItem& item) {
    const Blocks& blocks = item.blocks;
    require_rows(blocks.geometry, blocks.table, item.kv_head, item.tokens, item.count, false);
    score_kernels().score[type_of(blocks)](item);
}

void widen_keys(const WidenItem& item) {
    const Blocks& blocks = item.blocks;
    require_range(blocks.geometry, blocks.table, item.kv_head, item.begin, item.count, false);
    score_kernels().widen_keys[type_of(blocks)](item);
}

void widen_values(const WidenItem& item) {
    const Blocks& blocks = item.blocks;
    require_range(blocks.geometry, blocks.table, item.kv_head, item.begin, item.count, true);
    score_kernels().widen_values[type_of(blocks)](item);
}

}  // namespace kvdb::indexes
