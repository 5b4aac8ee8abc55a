// Keys of a sequence in pages of PAGE_LEN slots, which the item's table names. Twin of kv_dense.wgsl.
import package::parts::plan::Item;
import package::parts::plan::plan;
import package::parts::strides::strides;

const PAGE_LEN: u32 = 16u;

fn k_at(item: Item, kv_head: u32, key: u32) -> u32 {
    return item.k + kv_head * strides.k_head + plan[item.table + key / PAGE_LEN] * strides.k_page + key % PAGE_LEN * strides.k_seq;
}

fn v_at(item: Item, kv_head: u32, key: u32) -> u32 {
    return item.v + kv_head * strides.v_head + plan[item.table + key / PAGE_LEN] * strides.v_page + key % PAGE_LEN * strides.v_seq;
}
