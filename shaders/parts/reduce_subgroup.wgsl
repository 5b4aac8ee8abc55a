// Over a team of TEAM neighbouring lanes, by shuffles whose masks stay below TEAM: right at every subgroup size ≥ TEAM,
// TEAM a power of two. Every lane gets the result. Twin of reduce.wgsl.
fn team_max(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var result = value;
    for (var mask = 1u; mask < TEAM; mask *= 2u) {
        result = max(result, subgroupShuffleXor(result, mask));
    }
    return result;
}

fn team_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var result = value;
    for (var mask = 1u; mask < TEAM; mask *= 2u) {
        result += subgroupShuffleXor(result, mask);
    }
    return result;
}
