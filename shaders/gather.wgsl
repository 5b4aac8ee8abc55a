// Moves rows of heads between pages and dense tensors, or pages and pages, bit by bit and whatever their type.
//
// A unit is as many bytes as all places and sizes are multiples of: 16, 4 or 2. Workgroups (x, y) share a run of tokens, those
// of z its cells (token, head, unit of the row); a lane takes every (WORKGROUP · workgroups)th.

import package::parts::runs::rows;
import package::parts::runs::runs;
import package::parts::runs::run_of;
import package::parts::runs::source_of;
import package::parts::runs::target_of;
import package::parts::runs::WORKGROUP;
import package::parts::unit16::move_unit;

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = run_of(workgroup);
    if index >= rows.runs {
        return;
    }
    let run = runs[index];
    let row = rows.heads * rows.dim;
    for (var i = WORKGROUP * workgroup.z + lane; i < run.tokens * row; i += WORKGROUP * workgroups.z) {
        let token = i / row;
        let head = i % row / rows.dim;
        let unit = i % rows.dim;
        move_unit(target_of(run, token, head) + unit, source_of(run, token, head) + unit);
    }
}
