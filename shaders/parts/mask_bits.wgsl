// A mask of one bit a key, 1 is visible, lowest bit first; every row starts at a new word, so `rows` counts words.
const MASK: bool = true;

@group(0) @binding(8) var<storage, read> mask: array<u32>;

fn mask_at(rows: vec4<u32>, key: u32) -> vec4<bool> {
    let word = rows + key / 32u;
    let bits = vec4<u32>(mask[word.x], mask[word.y], mask[word.z], mask[word.w]) >> vec4<u32>(key % 32u);
    return (bits & vec4<u32>(1u)) == vec4<u32>(1u);
}
