// What an adapter does, found out once: does NaN survive arithmetic (exp2 may make ∞ of it, that is noticed too), how long may a loop run.
@group(0) @binding(0) var<storage, read> input: array<u32>;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(1)
fn main() {
    // input[0]: bits of a NaN, input[1]: a number of iterations.
    let x = bitcast<f32>(input[0]);
    let y = select(x * 2.0, -1.0, x < 0.0);
    result[0] = bitcast<u32>(y);
    var count = 0u;
    var hash = 1u;
    for (var i = 0u; i < input[1]; i += 1u) {
        hash = hash * 1664525u + 1013904223u; // keeps the loop from being replaced by its result
        count += select(1u, 2u, hash == 0u);
    }
    result[1] = count;
    result[2] = hash;
    result[3] = bitcast<u32>(exp2(x));
}
