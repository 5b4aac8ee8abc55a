// A schedule's plan as one dispatch sees it: its items first, and behind them what they point to (page tables, slots).
// An item is up to a tile of packed rows of one sequence against a range of keys. Offsets are in elements, of the sequence's
// first token (keys: of key 0, or of page 0 if keys lie in pages); those of a bit mask in words.
struct Item {
    q: u32,
    k: u32,
    v: u32,
    out: u32,
    lse: u32,
    bias: u32,
    bias_head: u32,
    bias_row: u32,
    mask: u32,
    mask_head: u32,
    mask_row: u32,
    row_begin: u32,
    row_count: u32,
    kv_begin: u32,
    kv_end: u32,
    q_pos: i32, // position of token 0 among the keys
    slot: u32,  // split items: first partial state
    table: u32, // keys in pages: where in the plan the sequence's pages begin
}

const ITEM_WORDS: u32 = 18u;

@group(0) @binding(3) var<storage, read> plan: array<u32>;

fn item_at(index: u32) -> Item {
    let i = index * ITEM_WORDS;
    return Item(
        plan[i], plan[i + 1u], plan[i + 2u], plan[i + 3u], plan[i + 4u], plan[i + 5u], plan[i + 6u], plan[i + 7u], plan[i + 8u],
        plan[i + 9u], plan[i + 10u], plan[i + 11u], plan[i + 12u], plan[i + 13u], plan[i + 14u], bitcast<i32>(plan[i + 15u]),
        plan[i + 16u], plan[i + 17u],
    );
}
