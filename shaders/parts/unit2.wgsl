// Units of 2 bytes. The other half of a word may belong to another invocation, or to no one here: each half is cleared and
// set by atomics that touch nothing else.

@group(0) @binding(2) var<storage, read> source: array<u32>;
@group(0) @binding(3) var<storage, read_write> destination: array<atomic<u32>>;

fn move_unit(to: u32, at: u32) {
    let half = (source[at / 2u] >> (16u * (at & 1u))) & 0xffffu;
    let shift = 16u * (to & 1u);
    atomicAnd(&destination[to / 2u], 0xffff0000u >> shift);
    atomicOr(&destination[to / 2u], half << shift);
}
