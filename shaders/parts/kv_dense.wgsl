// Keys of a sequence at equal distances.
import package::parts::plan::Item;
import package::parts::strides::strides;

fn k_at(item: Item, kv_head: u32, key: u32) -> u32 {
    return item.k + kv_head * strides.k_head + key * strides.k_seq;
}

fn v_at(item: Item, kv_head: u32, key: u32) -> u32 {
    return item.v + kv_head * strides.v_head + key * strides.v_seq;
}
