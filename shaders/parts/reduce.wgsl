// Over a team of TEAM neighbouring lanes, through workgroup memory: any adapter. Every lane gets the result.
// The caller has a workgroupBarrier between two calls. Needs WORKGROUP and TEAM.
var<workgroup> team_values: array<vec4<f32>, WORKGROUP>;

fn team_max(value: vec4<f32>, lane: u32) -> vec4<f32> {
    team_values[lane] = value;
    workgroupBarrier();
    let first = lane - lane % TEAM;
    var result = team_values[first];
    for (var i = 1u; i < TEAM; i += 1u) {
        result = max(result, team_values[first + i]);
    }
    return result;
}

fn team_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    team_values[lane] = value;
    workgroupBarrier();
    let first = lane - lane % TEAM;
    var result = team_values[first];
    for (var i = 1u; i < TEAM; i += 1u) {
        result += team_values[first + i];
    }
    return result;
}
