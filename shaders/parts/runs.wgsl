// Runs of neighbouring tokens to be moved from rows of one tensor to rows of another: where each token's heads lie.
// A place is a block (a page, a sequence) and a slot in it.

struct Run {
    block: u32,
    slot: u32,
    to_block: u32,
    to_slot: u32,
    tokens: u32,
    position: u32, // of the first token, for rotary embedding
}

// Distances in units that the kernel says, elements or bytes together.
struct Rows {
    first: u32,
    block: u32,
    slot: u32,
    head: u32,
    to_first: u32,
    to_block: u32,
    to_slot: u32,
    to_head: u32,
    runs: u32,
    heads: u32,
    dim: u32,         // of a head, in units
    team_rows: u32,   // that a team moves
    stays: u32,       // 1: tokens go to the block and slot that they come from
    pairs: u32,       // that are turned
    interleaved: u32, // 1: dims 2i and 2i + 1 are a pair, not i and i + pairs
    factor: f32,      // on pairs that are turned
}

@group(0) @binding(0) var<uniform> rows: Rows;
@group(0) @binding(1) var<storage, read> runs: array<Run>;

const WORKGROUP: u32 = 64u;
const MOST_GROUPS: u32 = 65535u; // of one dimension

// What a lane does: of `rows.team_rows` rows from head `head` of token `token` on, `unit` and every `across`th one after it.
// Neighbouring lanes are a team: one for each unit of a row, or the workgroup where it has fewer; those left over have none.
struct Share {
    unit: u32,
    across: u32,
    token: u32,
    head: u32,
}

// Workgroups (x, y) share run `y · MOST_GROUPS + x`, of which there may be none.
fn run_of(workgroup: vec3<u32>) -> u32 {
    return workgroup.y * MOST_GROUPS + workgroup.x;
}

fn share_of(part: u32, lane: u32, units: u32) -> Share {
    let across = min(units, WORKGROUP);
    let teams = WORKGROUP / across;
    let team = lane / across;
    let row = (part * teams + team) * rows.team_rows;
    return Share(select(units, lane % across, team < teams), across, row / rows.heads, row % rows.heads);
}

fn source_of(run: Run, token: u32, head: u32) -> u32 {
    return rows.first + run.block * rows.block + (run.slot + token) * rows.slot + head * rows.head;
}

fn target_of(run: Run, token: u32, head: u32) -> u32 {
    let block = select(run.to_block, run.block, rows.stays == 1u);
    let slot = select(run.to_slot, run.slot, rows.stays == 1u);
    return rows.to_first + block * rows.to_block + (slot + token) * rows.to_slot + head * rows.to_head;
}
