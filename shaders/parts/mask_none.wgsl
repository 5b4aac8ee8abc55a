// No mask.
const MASK: bool = false;

fn mask_at(rows: vec4<u32>, key: u32) -> vec4<bool> {
    return vec4<bool>(true);
}
