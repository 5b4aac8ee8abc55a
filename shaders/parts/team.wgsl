// Sums over a team of TEAM neighbouring lanes, through workgroup memory: any adapter. Every lane gets the result, and all
// lanes of the workgroup must call. Needs WORKGROUP and TEAM.
var<workgroup> team_values: array<vec4<f32>, WORKGROUP>;

fn sum_over_team(value: vec4<f32>, lane: u32) -> vec4<f32> {
    workgroupBarrier(); // the readers of the last sum are done
    team_values[lane] = value;
    workgroupBarrier();
    let first = lane - lane % TEAM;
    var result = team_values[first];
    for (var i = 1u; i < TEAM; i += 1u) {
        result += team_values[first + i];
    }
    return result;
}
