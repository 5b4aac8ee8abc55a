// A mask of one byte an element, anything but 0 is visible; four to a word, the first in the lowest byte.
const MASK: bool = true;

@group(0) @binding(8) var<storage, read> mask: array<u32>;

fn mask_byte(i: u32) -> bool {
    return ((mask[i / 4u] >> (8u * (i % 4u))) & 0xffu) != 0u;
}

fn mask_at(rows: vec4<u32>, key: u32) -> vec4<bool> {
    let i = rows + key;
    return vec4<bool>(mask_byte(i.x), mask_byte(i.y), mask_byte(i.z), mask_byte(i.w));
}
