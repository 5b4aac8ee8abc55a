// Sums over a team of TEAM neighbouring lanes, by shuffles whose masks stay below TEAM: right at every subgroup size ≥ TEAM,
// TEAM a power of two. Every lane gets the result, to the bit. Twin of team.wgsl.
fn sum_over_team(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var result = value;
    for (var mask = 1u; mask < TEAM; mask *= 2u) {
        result += subgroupShuffleXor(result, mask);
    }
    return result;
}
