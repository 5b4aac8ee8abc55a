// Moves rows of heads between pages and dense tensors, or pages and pages, bit by bit and whatever their type.
//
// A unit is as many bytes as all places and sizes are multiples of: 16, 4 or 2. Workgroups (x, y) share a run of tokens, those
// of z its rows; a lane owns a unit of a row and goes over rows.

import package::parts::runs::rows;
import package::parts::runs::runs;
import package::parts::runs::run_of;
import package::parts::runs::share_of;
import package::parts::runs::source_of;
import package::parts::runs::target_of;
import package::parts::runs::WORKGROUP;
import package::parts::unit16::move_unit;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let index = run_of(workgroup);
    if index >= rows.runs {
        return;
    }
    let run = runs[index];
    let share = share_of(workgroup.z, lane, rows.dim);
    for (var unit = share.unit; unit < rows.dim; unit += share.across) {
        var token = share.token;
        var head = share.head;
        for (var i = 0u; i < rows.team_rows && token < run.tokens; i += 1u) {
            move_unit(target_of(run, token, head) + unit, source_of(run, token, head) + unit);
            head += 1u;
            if head == rows.heads {
                head = 0u;
                token += 1u;
            }
        }
    }
}
