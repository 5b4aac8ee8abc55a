// C += A·B for one 64×64 tile of C in registers, STEP inner indices at a time.
//
// A staged inner index is a row of `stage`: 16 vec4s of the 64 rows of A, then 16 vec4s of the 64 columns of B. A lane owns
// 4·ROW_VECS rows and 4·COLUMN_VECS columns; `sums` holds its rows one after the other, COLUMN_VECS vec4s each.
const ROW_VECS: u32 = 2u;
const COLUMN_VECS: u32 = 2u;
const STEP: u32 = 16u;

const DOWN: u32 = 16u / ROW_VECS;      // lanes below each other
const ACROSS: u32 = 16u / COLUMN_VECS; // lanes beside each other
const WORKGROUP: u32 = DOWN * ACROSS;
const SUMS: u32 = 4u * ROW_VECS * COLUMN_VECS;
const STAGE_PITCH: u32 = 33u; // the odd vec4 spreads a transposed store over banks

var<workgroup> stage: array<vec4<f32>, STEP * STAGE_PITCH>;

// Stages four vec4s along the inner dimension, from inner index `inner` on, as column `at` of the stage.
fn stage_turned(inner: u32, at: u32, block: mat4x4<f32>) {
    let turned = transpose(block);
    let first = inner * STAGE_PITCH + at;
    stage[first] = turned[0];
    stage[first + STAGE_PITCH] = turned[1];
    stage[first + 2u * STAGE_PITCH] = turned[2];
    stage[first + 3u * STAGE_PITCH] = turned[3];
}

fn multiply(sums: ptr<function, array<vec4<f32>, SUMS>>, lane: u32) {
    for (var s = 0u; s < STEP; s += 1u) {
        for (var i = 0u; i < ROW_VECS; i += 1u) {
            let a = stage[s * STAGE_PITCH + i * DOWN + lane / ACROSS];
            for (var j = 0u; j < COLUMN_VECS; j += 1u) {
                let b = stage[s * STAGE_PITCH + 16u + j * ACROSS + lane % ACROSS];
                let at = 4u * i * COLUMN_VECS + j;
                (*sums)[at] += a.x * b;
                (*sums)[at + COLUMN_VECS] += a.y * b;
                (*sums)[at + 2u * COLUMN_VECS] += a.z * b;
                (*sums)[at + 3u * COLUMN_VECS] += a.w * b;
            }
        }
    }
}

// Row in the tile of sum `i`, and its column in vec4s.
fn row_of(i: u32, lane: u32) -> u32 {
    let row = i / COLUMN_VECS;
    return 4u * (row / 4u * DOWN + lane / ACROSS) + row % 4u;
}

fn column_of(i: u32, lane: u32) -> u32 {
    return i % COLUMN_VECS * ACROSS + lane % ACROSS;
}

// Half of the lane's sums to slots of its own in `stage`, from where a loop of any length can take them. A loop over `sums`
// itself must be short: a compiler that does not unroll it keeps them in memory, which halves the speed of the whole kernel.
fn put_aside(sums: ptr<function, array<vec4<f32>, SUMS>>, first: u32, lane: u32) {
    for (var i = 0u; i < SUMS / 2u; i += 1u) {
        stage[i * WORKGROUP + lane] = (*sums)[first + i];
    }
}

fn aside(i: u32, lane: u32) -> vec4<f32> {
    return stage[i * WORKGROUP + lane];
}
