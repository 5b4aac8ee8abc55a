// An item that has all keys of its rows: final output and LSE.
import package::parts::finish::finish;
import package::parts::lse_none::put_lse;
@binding(9) import package::parts::store_f32 as out;

struct Done {
    offset: vec4<u32>,
    factor: vec4<f32>,
}

fn finish_row(item: Item, row: u32, head: u32, m: f32, l: f32, stored: bool) -> f32 {
    let end = finish(m, l, head);
    if stored {
        put_lse(item.lse + head * strides.lse_head + row / params.group, end.lse);
    }
    return end.factor;
}

fn finish4(item: Item, kv_head: u32, row: vec4<u32>, head: vec4<u32>, m: vec4<f32>, l: vec4<f32>, stored: vec4<bool>) -> Done {
    let factor = vec4<f32>(
        finish_row(item, row.x, head.x, m.x, l.x, stored.x),
        finish_row(item, row.y, head.y, m.y, l.y, stored.y),
        finish_row(item, row.z, head.z, m.z, l.z, stored.z),
        finish_row(item, row.w, head.w, m.w, l.w, stored.w),
    );
    return Done(item.out + row / params.group * strides.out_seq + head * strides.out_head, factor);
}

fn put(offset: u32, value: vec4<f32>, count: i32) {
    out::store4(offset, value, count);
}
