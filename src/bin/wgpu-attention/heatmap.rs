//! Draws an attention matrix in the terminal.

/// Matplotlib's inferno at equal distances: even steps look even, and the least is black.
const PALETTE: [[u8; 3]; 17] = [
    [0, 0, 4],
    [11, 7, 36],
    [33, 12, 74],
    [61, 9, 101],
    [87, 16, 110],
    [113, 25, 110],
    [138, 34, 106],
    [163, 44, 97],
    [188, 55, 84],
    [210, 70, 68],
    [228, 90, 49],
    [241, 115, 29],
    [249, 142, 9],
    [252, 172, 17],
    [249, 203, 53],
    [242, 234, 105],
    [252, 255, 164],
];
const SHADES: [char; 10] = [' ', '.', ':', '-', '=', '+', '*', '#', '%', '@'];
/// For NaN and infinities, unlike any colour of the palette.
const NOT_FINITE: [u8; 3] = [0, 200, 255];
/// How far below the largest weight the scale reaches.
const DECADES: f32 = 3.0;

/// Draws `weights` (row-major, one row for each query, from 0 to 1) in lines of at most `width`
/// characters: 24-bit colours with two pixels in each character, or ASCII shades.
///
/// Attention is sparse and heavy-tailed, so the scale is logarithmic, and a pixel that stands for
/// several weights shows the largest: means would hide diagonals and single columns.
pub fn draw(weights: &[f32], rows: usize, columns: usize, width: usize, colour: bool) -> String {
    if weights.is_empty() || rows.checked_mul(columns) != Some(weights.len()) {
        let count = weights.len();
        return format!("no attention map: {rows} queries, {columns} keys, {count} weights\n");
    }
    let gutter = (rows - 1).to_string().len();
    let space = width.saturating_sub(gutter + 1).max(1);
    let (across, down) = size(rows, columns, space, colour);
    let mut pixels = shrink(weights, rows, columns, across, down);
    let largest = weights.iter().copied().filter(|w| w.is_finite()).fold(0.0, f32::max);
    for pixel in &mut pixels {
        *pixel = level(*pixel, largest);
    }

    let mut text = format!("{:gutter$} key → 0…{}, query ↓\n", "", columns - 1);
    let lines = pixels.chunks(if colour { 2 * across } else { across });
    let last = lines.len() - 1;
    for (number, line) in lines.enumerate() {
        let label = match number {
            0 => "0".to_owned(),
            number if number == last => (rows - 1).to_string(),
            _ => String::new(),
        };
        text += &format!("{label:>gutter$} ");
        if colour {
            let (upper, lower) = line.split_at(across);
            half_blocks(&mut text, upper, lower);
        } else {
            text.extend(line.iter().map(|&level| shade(level)));
        }
        text.push('\n');
    }

    text += &legend(largest, colour);
    if across < columns || down < rows {
        let (high, wide) = (rows.div_ceil(down), columns.div_ceil(across));
        text += &format!("; largest of up to {high} × {wide} weights");
    }
    let bad = weights.iter().filter(|w| !w.is_finite()).count();
    if bad > 0 {
        text += &format!("; {bad} not finite: ");
        if colour {
            half_blocks(&mut text, &[f32::NAN], &[f32::NAN]);
        } else {
            text.push(shade(f32::NAN));
        }
    }
    text.push('\n');
    text
}

/// Pixels across and down. Pixels are squares: half a character, or in ASCII a whole one for two.
fn size(rows: usize, columns: usize, space: usize, colour: bool) -> (usize, usize) {
    // Small matrices are enlarged up to this many characters.
    const SMALL: usize = 64;
    let longest = rows.max(columns);
    let scale = if longest > space {
        space as f64 / longest as f64
    } else if longest <= space.min(SMALL) / 4 {
        4.0
    } else if longest <= space.min(SMALL) / 2 {
        2.0
    } else {
        1.0
    };
    let aspect = if colour { 1.0 } else { 2.0 };
    let across = (columns as f64 * scale).round().max(1.0);
    let down = (rows as f64 * scale / aspect).round().max(1.0);
    (across as usize, down as usize)
}

/// Takes the largest weight for each pixel, or NaN where a weight is not finite.
fn shrink(weights: &[f32], rows: usize, columns: usize, across: usize, down: usize) -> Vec<f32> {
    // Enlarged, neighbouring pixels share a weight.
    let range = |pixel: usize, pixels: usize, length: usize| {
        let start = pixel * length / pixels;
        start..((pixel + 1) * length / pixels).max(start + 1)
    };
    let mut pixels = vec![f32::MIN; across * down];
    for (y, line) in pixels.chunks_mut(across).enumerate() {
        for row in range(y, down, rows) {
            let row = &weights[row * columns..][..columns];
            for (x, pixel) in line.iter_mut().enumerate() {
                for &weight in &row[range(x, across, columns)] {
                    if pixel.is_nan() || !weight.is_finite() {
                        *pixel = f32::NAN;
                    } else {
                        *pixel = pixel.max(weight);
                    }
                }
            }
        }
    }
    pixels
}

/// The place on the logarithmic scale, from 0 to 1; NaN stays.
fn level(weight: f32, largest: f32) -> f32 {
    if weight <= 0.0 {
        return 0.0;
    }
    (1.0 + (weight / largest).log10() / DECADES).clamp(0.0, 1.0)
}

fn shade(level: f32) -> char {
    if level.is_nan() {
        return '?';
    }
    SHADES[(level * (SHADES.len() - 1) as f32).round() as usize]
}

fn rgb(level: f32) -> [u8; 3] {
    if level.is_nan() {
        return NOT_FINITE;
    }
    let place = level * (PALETTE.len() - 1) as f32;
    let below = place as usize;
    let above = (below + 1).min(PALETTE.len() - 1);
    std::array::from_fn(|i| {
        let (a, b) = (f32::from(PALETTE[below][i]), f32::from(PALETTE[above][i]));
        (a + (b - a) * place.fract()).round() as u8
    })
}

/// Writes one line of characters; `lower` is empty below the last row of an odd number.
fn half_blocks(text: &mut String, upper: &[f32], lower: &[f32]) {
    let mut previous = None;
    for (x, &upper) in upper.iter().enumerate() {
        let colours = (rgb(upper), lower.get(x).map(|&lower| rgb(lower)));
        if previous != Some(colours) {
            let ([r, g, b], lower) = colours;
            text.push_str(&format!("\x1b[38;2;{r};{g};{b};"));
            match lower {
                Some([r, g, b]) => text.push_str(&format!("48;2;{r};{g};{b}m")),
                None => text.push_str("49m"),
            }
            previous = Some(colours);
        }
        text.push('▀');
    }
    text.push_str("\x1b[0m");
}

fn legend(largest: f32, colour: bool) -> String {
    if largest <= 0.0 {
        return "no weight is above 0".to_owned();
    }
    const STEPS: usize = 20;
    let steps: Vec<f32> = (0..STEPS).map(|i| i as f32 / (STEPS - 1) as f32).collect();
    let mut bar = String::new();
    if colour {
        half_blocks(&mut bar, &steps, &steps);
    } else {
        bar.extend(SHADES);
    }
    let least = short(largest / 10f32.powf(DECADES));
    format!("≤{least} {bar} {}, log scale", short(largest))
}

/// Two significant digits.
fn short(value: f32) -> String {
    if !(1e-6..1e6).contains(&value) {
        return format!("{value:.1e}");
    }
    let decimals = (1.0 - value.log10().floor()).max(0.0) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn causal(size: usize) -> Vec<f32> {
        let weight = |i: usize| {
            if i % size <= i / size { 1.0 / (i / size + 1) as f32 } else { 0.0 }
        };
        (0..size * size).map(weight).collect()
    }

    /// The map alone, without escape sequences.
    fn map(text: &str) -> Vec<String> {
        let mut lines: Vec<String> = text
            .lines()
            .map(|line| {
                let parts = line.split("\x1b[").enumerate();
                parts.map(|(i, s)| if i == 0 { s } else { s.split_once('m').unwrap().1 }).collect()
            })
            .collect();
        lines.pop();
        lines.remove(0);
        lines
    }

    #[test]
    fn fits_the_width_and_keeps_the_aspect() {
        for (rows, columns) in [(1, 1), (9, 9), (132, 132), (1, 500), (500, 1), (300, 100)] {
            let weights = vec![0.5; rows * columns];
            for width in [0, 1, 5, 20, 79, 80, 200, usize::MAX] {
                for colour in [false, true] {
                    let lines = map(&draw(&weights, rows, columns, width, colour));
                    let gutter = (rows - 1).to_string().len() + 1;
                    let across = lines[0].chars().count() - gutter;
                    assert!(across + gutter <= width.max(gutter + 1), "{rows} {columns} {width}");
                    assert!(lines.iter().all(|line| line.chars().count() == across + gutter));
                    let high = 2.0 * lines.len() as f64;
                    let expected = rows as f64 * across as f64 / columns as f64;
                    if rows > 1 && columns > 1 && across > 1 {
                        assert!((high - expected).abs() < 4.0, "{rows} {columns} {width} {high}");
                    }
                }
            }
        }
    }

    #[test]
    fn draws_in_ascii() {
        let text = draw(&[1.0, 0.0, 0.03, 0.97], 2, 2, 80, false);
        let expected = "  key → 0…1, query ↓\n0 @@@@    \n  @@@@    \n  ====@@@@\n1 ====@@@@\n\
                        ≤0.0010  .:-=+*#%@ 1.0, log scale\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn draws_in_colour() {
        let text = draw(&[1.0, 0.0, 0.0], 3, 1, 3, true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "0 \x1b[38;2;252;255;164;49m▀\x1b[0m");
        let text = draw(&causal(40), 40, 40, 43, true);
        assert_eq!(text.lines().count(), 22);
        let first = text.lines().nth(1).unwrap();
        assert!(first.contains("\x1b[38;2;0;0;4;48;2;0;0;4m▀"), "{first:?}");
        assert!(first.ends_with("▀▀\x1b[0m"), "{first:?}");
    }

    #[test]
    fn keeps_single_weights_when_it_shrinks() {
        let mut weights = vec![0.0; 1000 * 1000];
        weights[777 * 1000 + 333] = 1.0;
        let text = draw(&weights, 1000, 1000, 54, false);
        assert_eq!(map(&text).concat().matches('@').count(), 1);
        assert!(text.contains("largest of up to 40 × 20 weights"), "{text}");
    }

    #[test]
    fn says_when_there_is_nothing_to_draw() {
        for (weights, rows, columns) in
            [(&[][..], 0, 0), (&[], 0, 5), (&[], 5, 0), (&[1.0], 2, 2), (&[1.0], usize::MAX, 2)]
        {
            let text = draw(weights, rows, columns, 80, true);
            assert!(text.starts_with("no attention map"), "{text}");
        }
        assert!(draw(&[0.0; 4], 2, 2, 80, false).contains("no weight is above 0"));
        assert!(draw(&[-1.0; 4], 2, 2, 80, true).contains("no weight is above 0"));
    }

    #[test]
    fn shows_what_is_not_finite() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut weights = causal(100);
            weights[50] = bad;
            let text = draw(&weights, 100, 100, 30, false);
            assert_eq!(map(&text).concat().matches('?').count(), 1);
            assert!(text.contains("1 not finite: ?"), "{text}");
            let text = draw(&weights, 100, 100, 30, true);
            assert!(text.contains("38;2;0;200;255"), "{text}");
            assert!(draw(&[bad; 4], 2, 2, 80, false).contains("no weight is above 0"));
        }
        for extreme in [f32::MAX, f32::MIN_POSITIVE, 1e-45] {
            draw(&[extreme, 0.5], 1, 2, 80, true);
            draw(&[extreme], 1, 1, 80, false);
        }
    }
}
