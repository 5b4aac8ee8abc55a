// Units of 16 bytes.

@group(0) @binding(2) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> destination: array<vec4<u32>>;

fn move_unit(to: u32, at: u32) {
    destination[to] = source[at];
}
