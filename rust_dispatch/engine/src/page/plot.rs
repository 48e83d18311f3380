//! Plots as inline SVG.
//!
//! Drawn here and not by a plotting crate because those write colours and sizes into the picture:
//! ours take both from the page, so that one picture serves light and dark, a phone and a wide
//! screen, and every mark carries its own words (shown where a pointer rests, read aloud by a
//! screen reader).

use maud::{Markup, html};

use crate::histogram::Bucket;
use crate::words;

/// What a plot's text is laid out for. A plot fills its column, which is about as wide.
const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 190.0;
const LEFT: f64 = 40.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 34.0;
/// Height of a mark's words.
const MARK_ROW: f64 = 12.0;
/// Columns of one histogram at most.
const MAX_BINS: usize = 36;

/// One column of a plot.
#[derive(Clone, Debug)]
pub struct Column {
    /// Under it.
    pub label: String,
    /// Its height.
    pub value: f64,
    /// What it says of itself.
    pub words: String,
    /// JSON pointer into the report, where the value is one of the report's.
    pub field: Option<String>,
}

/// Values from `from` to `to` of a histogram.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bin {
    /// Lower edge.
    pub from: f64,
    /// Upper edge.
    pub to: f64,
    /// Values between them.
    pub count: u64,
}

/// A line across a histogram, such as its P90.
#[derive(Clone, Debug)]
pub struct Mark {
    /// `P90`.
    pub name: &'static str,
    /// Where.
    pub value: f64,
}

/// How values lie on an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// Equal differences.
    Linear,
    /// Equal ratios; for times, in seconds.
    Times,
}

/// A part of a bar.
#[derive(Clone, Debug)]
pub struct Part {
    /// Class that gives the colour.
    pub class: &'static str,
    /// Its length.
    pub value: f64,
    /// What it says of itself.
    pub words: String,
    /// JSON pointer into the report, where the value is one of the report's.
    pub field: Option<String>,
}

/// A bar with its name above it.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Above it, at the left.
    pub label: String,
    /// Above it, at the right.
    pub value: String,
    /// From left to right.
    pub parts: Vec<Part>,
    /// A line across the bar.
    pub mark: Option<f64>,
}

/// A bar of a timeline, in seconds from its start.
#[derive(Clone, Debug)]
pub struct Span {
    /// Where it begins.
    pub begin_s: f64,
    /// Where the first part ends and the second begins.
    pub middle_s: f64,
    /// Where it ends.
    pub end_s: f64,
    /// What it says of itself.
    pub words: String,
}

/// A row of a timeline.
#[derive(Clone, Debug)]
pub struct Lane {
    /// Above it.
    pub label: String,
    /// How deep it is nested.
    pub depth: usize,
    /// From left to right.
    pub spans: Vec<Span>,
}

fn px(value: f64) -> String {
    format!("{value:.2}")
}

/// Step between ticks, so that at most `most` of them reach `top`: 1, 2 or 5 times a power of 10.
///
/// ```
/// use lowlat_engine::page::plot::tick_step;
/// assert_eq!(tick_step(7.0, 4), 2.0);
/// assert_eq!(tick_step(0.9, 5), 0.2);
/// assert_eq!(tick_step(100.0, 5), 20.0);
/// ```
#[must_use]
pub fn tick_step(top: f64, most: usize) -> f64 {
    let least = top / most as f64;
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|factor| factor * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

/// Ticks from 0 to the first at or above `top`.
fn ticks(top: f64, most: usize) -> Vec<f64> {
    let step = tick_step(top, most);
    let last = (top / step - 1e-9).ceil() as usize;
    (0..=last.max(1)).map(|tick| tick as f64 * step).collect()
}

/// The horizontal lines with their numbers, and the names of both axes.
fn frame(ticks: &[f64], y_of: impl Fn(f64) -> f64, y_name: &str, x_name: &str) -> Markup {
    html! {
        text class="axis" x="0" y="10" { (y_name) }
        @for &tick in ticks {
            line class=(if tick == 0.0 { "base" } else { "grid" })
                x1=(px(LEFT)) x2=(px(WIDTH - RIGHT)) y1=(px(y_of(tick))) y2=(px(y_of(tick))) {}
            text class="tick end" x=(px(LEFT - 6.0)) y=(px(y_of(tick) + 3.5)) {
                (tick_words(tick))
            }
        }
        text class="axis end" x=(px(WIDTH - RIGHT)) y=(px(HEIGHT - 4.0)) { (x_name) }
    }
}

fn tick_words(value: f64) -> String {
    if value.fract() == 0.0 {
        words::count(value as u64)
    } else {
        let text = words::short(value);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

fn picture(name: &str, height: f64, inner: &Markup) -> Markup {
    html! {
        svg class="plot" viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(name) {
            (inner)
        }
    }
}

/// Columns side by side, from 0 to `top` or to the highest.
#[must_use]
pub fn columns(
    name: &str,
    y_name: &str,
    x_name: &str,
    columns: &[Column],
    top: Option<f64>,
) -> Markup {
    let highest = columns
        .iter()
        .map(|column| column.value)
        .fold(0.0, f64::max);
    let ticks = ticks(top.unwrap_or(highest).max(f64::MIN_POSITIVE), 4);
    let last = ticks[ticks.len() - 1];
    let y_of = |value: f64| HEIGHT - BOTTOM - value / last * (HEIGHT - TOP - BOTTOM);
    let pitch = (WIDTH - LEFT - RIGHT) / columns.len().max(1) as f64;
    let width = (pitch * 0.72).min(44.0);
    let inner = html! {
        (frame(&ticks, y_of, y_name, x_name))
        @for (place, column) in columns.iter().enumerate() {
            @let x = LEFT + (place as f64 + 0.5) * pitch;
            rect class="mark c1" x=(px(x - width / 2.0)) width=(px(width))
                y=(px(y_of(column.value))) height=(px(y_of(0.0) - y_of(column.value))) rx="2"
                data-field=[&column.field] data-value=(column.value) {
                title { (column.words) }
            }
            text class="tick middle" x=(px(x)) y=(px(HEIGHT - BOTTOM + 14.0)) { (column.label) }
        }
    };
    picture(name, HEIGHT, &inner)
}

/// A histogram with its marks. Bins ascend; every one has the same width on the scale.
#[must_use]
pub fn histogram(
    name: &str,
    y_name: &str,
    unit: &str,
    scale: Scale,
    bins: &[Bin],
    marks: &[Mark],
) -> Markup {
    let place = |value: f64| match scale {
        Scale::Linear => value,
        Scale::Times => value.max(1e-9).log10(),
    };
    let highest = bins.iter().map(|bin| bin.count).max().unwrap_or(0);
    let ticks = ticks(highest.max(1) as f64, 4);
    let whole: Vec<f64> = ticks
        .iter()
        .copied()
        .filter(|tick| tick.fract() == 0.0)
        .collect();
    let last = ticks[ticks.len() - 1];
    let top = TOP + marks.len() as f64 * MARK_ROW;
    let y_of = |value: f64| HEIGHT - BOTTOM - value / last * (HEIGHT - top - BOTTOM);
    let (first, end) = match (bins.first(), bins.last()) {
        (Some(first), Some(last)) => (place(first.from), place(last.to)),
        _ => (0.0, 1.0),
    };
    let x_of = |value: f64| {
        let share = ((place(value) - first) / (end - first)).clamp(0.0, 1.0);
        LEFT + share * (WIDTH - LEFT - RIGHT)
    };
    let say = |value: f64| match scale {
        Scale::Linear => format!("{} {unit}", words::short(value)),
        Scale::Times => {
            let (number, unit) = words::time(value);
            format!("{number} {unit}")
        }
    };
    let inner = html! {
        (frame(&whole, y_of, y_name, unit_name(scale, unit)))
        @for bin in bins {
            @let (left, right) = (x_of(bin.from), x_of(bin.to));
            rect class="mark c1" x=(px(left + 0.5)) width=(px((right - left - 1.0).max(0.5)))
                y=(px(y_of(bin.count as f64)))
                height=(px(y_of(0.0) - y_of(bin.count as f64))) data-value=(bin.count) {
                title { (say(bin.from)) " to " (say(bin.to)) ": " (words::count(bin.count)) }
            }
        }
        @for tick in x_ticks(scale, bins) {
            text class="tick middle" x=(px(x_of(tick))) y=(px(HEIGHT - BOTTOM + 14.0)) {
                @match scale {
                    Scale::Linear => (tick_words(tick)),
                    Scale::Times => (time_tick(tick)),
                }
            }
        }
        (mark_lines(marks, x_of, say))
    };
    picture(name, HEIGHT, &inner)
}

fn unit_name(scale: Scale, unit: &str) -> &str {
    match scale {
        Scale::Linear => unit,
        Scale::Times => "time, equal steps are equal ratios",
    }
}

fn time_tick(value: f64) -> String {
    let (number, unit) = words::time(value);
    let number = if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        &number
    };
    format!("{number} {unit}")
}

/// A line a mark, each with its words in a row of its own above the plot: marks may lie close.
fn mark_lines(marks: &[Mark], x_of: impl Fn(f64) -> f64, say: impl Fn(f64) -> String) -> Markup {
    html! {
        @for (row, mark) in marks.iter().enumerate() {
            @let (x, y) = (x_of(mark.value), TOP + row as f64 * MARK_ROW);
            line class="cut" x1=(px(x)) x2=(px(x)) y1=(px(y - 8.0)) y2=(px(HEIGHT - BOTTOM)) {}
        }
        @for (row, mark) in marks.iter().enumerate() {
            @let (x, y) = (x_of(mark.value), TOP + row as f64 * MARK_ROW);
            @let at_left = x > LEFT + 0.5 * (WIDTH - LEFT - RIGHT);
            text class=(if at_left { "cut end" } else { "cut" })
                x=(px(if at_left { x - 4.0 } else { x + 4.0 })) y=(px(y)) {
                (mark.name) " " (say(mark.value))
            }
        }
    }
}

/// At most about six places on the x axis that are easy to read.
fn x_ticks(scale: Scale, bins: &[Bin]) -> Vec<f64> {
    let (Some(first), Some(last)) = (bins.first(), bins.last()) else {
        return Vec::new();
    };
    match scale {
        Scale::Linear => {
            let step = tick_step(last.to - first.from, 6);
            let begin = (first.from / step - 1e-9).ceil() as i64;
            let end = (last.to / step + 1e-9).floor() as i64;
            (begin..=end).map(|tick| tick as f64 * step).collect()
        }
        Scale::Times => {
            let (begin, end) = (first.from.max(1e-9), last.to);
            let decades = (end / begin).log10();
            let factors: &[f64] = match decades {
                decades if decades < 0.45 => &[1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0],
                decades if decades < 2.2 => &[1.0, 2.0, 5.0],
                decades if decades < 3.5 => &[1.0, 3.0],
                _ => &[1.0],
            };
            let powers = begin.log10().floor() as i32..=end.log10().ceil() as i32;
            let all: Vec<f64> = powers
                .flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)))
                .filter(|tick| (begin..=end).contains(tick))
                .collect();
            let every = all.len().div_ceil(6).max(1);
            all.into_iter().step_by(every).collect()
        }
    }
}

/// Bins of equal width over values that are not far apart, from a tick to a tick.
#[must_use]
pub fn linear_bins(values: &[f64]) -> Vec<Bin> {
    let finite: Vec<f64> = values
        .iter()
        .copied()
        .filter(|value| value.is_finite())
        .collect();
    let Some(most) = finite
        .iter()
        .copied()
        .reduce(f64::max)
        .filter(|&most| most > 0.0)
    else {
        return Vec::new();
    };
    let step = tick_step(most, 24);
    let num_bins = (most / step - 1e-9).ceil().max(1.0) as usize;
    let mut bins: Vec<Bin> = (0..num_bins)
        .map(|bin| Bin {
            from: bin as f64 * step,
            to: (bin + 1) as f64 * step,
            count: 0,
        })
        .collect();
    for value in finite {
        bins[((value / step).max(0.0) as usize).min(num_bins - 1)].count += 1;
    }
    bins
}

/// The buckets of a histogram of times as at most [`MAX_BINS`] bins without a gap.
///
/// ```
/// use lowlat_engine::histogram::Histogram;
/// use lowlat_engine::page::plot::time_bins;
/// let mut times = Histogram::default();
/// times.add(0.010, 3);
/// times.add(0.012, 2);
/// let bins = time_bins(&times.buckets());
/// assert_eq!(bins.iter().map(|bin| bin.count).sum::<u64>(), 5);
/// assert!(bins.windows(2).all(|pair| pair[0].to == pair[1].from));
/// ```
#[must_use]
pub fn time_bins(buckets: &[Bucket]) -> Vec<Bin> {
    // Edges are 40 a decade; a place is an edge's number.
    let place_of = |edge_s: f64| (edge_s.log10() * 40.0).round() as i64;
    let edge_s = |place: i64| 10f64.powf(place as f64 / 40.0);
    let (Some(first), Some(last)) = (buckets.first(), buckets.last()) else {
        return Vec::new();
    };
    let (first, last) = (place_of(first.up_to_s) - 1, place_of(last.up_to_s));
    let mut width = 2;
    while (last.div_euclid(width) - first.div_euclid(width)) as usize + 1 > MAX_BINS {
        width *= 2;
    }
    // One empty bin on each side, so that a lone one is not as wide as the plot.
    let begin = first.div_euclid(width) - 1;
    let end = (last - 1).div_euclid(width) + 1;
    let mut bins: Vec<Bin> = (begin..=end)
        .map(|bin| Bin {
            from: edge_s(bin * width),
            to: edge_s((bin + 1) * width),
            count: 0,
        })
        .collect();
    for bucket in buckets {
        let bin = (place_of(bucket.up_to_s) - 1).div_euclid(width) - begin;
        bins[bin as usize].count += bucket.count;
    }
    bins
}

/// Bars under each other, each with its name above it; `top` is as long as the plot is wide.
#[must_use]
pub fn bars(name: &str, bars: &[Bar], top: f64) -> Markup {
    let share = |value: f64| {
        let share = if top > 0.0 { value / top } else { 0.0 };
        format!("{:.3}%", share * 100.0)
    };
    html! {
        div class="bars" role="group" aria-label=(name) {
            @for bar in bars {
                div class="bar-head" {
                    span class="bar-label" title=(bar.label) { bdi { (bar.label) } }
                    span class="bar-value" { (bar.value) }
                }
                svg class="bar plot" height="16" role="img"
                    aria-label=(format!("{}: {}", bar.label, bar.value)) {
                    rect class="track" x="0" width="100%" y="2" height="12" rx="2" {}
                    @let begins = starts(&bar.parts);
                    @for (part, begin) in bar.parts.iter().zip(begins) {
                        rect class=(format!("mark {}", part.class)) x=(share(begin))
                            width=(share(part.value)) y="2" height="12" rx="2"
                            data-field=[&part.field] data-value=(part.value) {
                            title { (part.words) }
                        }
                    }
                    @if let Some(mark) = bar.mark {
                        line class="cut" x1=(share(mark)) x2=(share(mark)) y1="0" y2="16" {}
                    }
                }
            }
        }
    }
}

fn starts(parts: &[Part]) -> Vec<f64> {
    let mut begin = 0.0;
    parts
        .iter()
        .map(|part| {
            begin += part.value;
            begin - part.value
        })
        .collect()
}

/// A timeline: a row a lane, as wide as the page. `total_s` is its whole length.
#[must_use]
pub fn timeline(name: &str, lanes: &[Lane], total_s: f64) -> Markup {
    let total_s = total_s.max(f64::MIN_POSITIVE);
    let at = |seconds: f64| format!("{:.3}%", 100.0 * (seconds / total_s).clamp(0.0, 1.0));
    // A request that is too short to see is drawn as long as it takes to see it.
    let long = |seconds: f64| format!("{:.3}%", (100.0 * seconds / total_s).max(0.12));
    let step = tick_step(total_s, 5);
    let num_ticks = (total_s / step + 1e-9).floor() as usize;
    let ticks: Vec<f64> = (0..=num_ticks).map(|tick| tick as f64 * step).collect();
    html! {
        div class="timeline" role="group" aria-label=(name) {
            @for lane in lanes {
                div class="lane-label" style=(format!("padding-left:{}rem", lane.depth)) {
                    (lane.label)
                }
                svg class="lane plot" height="18" role="img" aria-label=(lane.label) {
                    @for &tick in &ticks {
                        line class="grid" x1=(at(tick)) x2=(at(tick)) y1="0" y2="18" {}
                    }
                    line class="base" x1="0" x2="100%" y1="17.5" y2="17.5" {}
                    @for span in &lane.spans {
                        g {
                            title { (span.words) }
                            rect class="mark wait" x=(at(span.begin_s)) y="3" height="12"
                                width=(long(span.middle_s - span.begin_s)) {}
                            rect class="mark c1" x=(at(span.middle_s)) y="3" height="12"
                                width=(long(span.end_s - span.middle_s)) {}
                        }
                    }
                }
            }
            svg class="lane-axis" height="16" aria-hidden="true" {
                @for (idx, &tick) in ticks.iter().enumerate() {
                    @let side = match idx {
                        0 => "tick",
                        _ if tick > 0.93 * total_s => "tick end",
                        _ => "tick middle",
                    };
                    text class=(side) x=(at(tick)) y="12" { (time_tick(tick)) }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_reach_the_top_and_are_few() {
        for top in [0.001, 0.7, 1.0, 3.0, 9.99, 1234.0, 1e9] {
            let ticks = ticks(top, 4);
            assert!(
                ticks.len() <= 6 && ticks[ticks.len() - 1] >= top * (1.0 - 1e-6),
                "{ticks:?}"
            );
        }
    }

    #[test]
    fn linear_bins_hold_every_value_once() {
        let bins = linear_bins(&[0.0, 1.0, 9.9, 10.0, 4.5]);
        assert_eq!(bins.iter().map(|bin| bin.count).sum::<u64>(), 5);
        assert!(bins.len() <= 24);
        assert!(linear_bins(&[]).is_empty() && linear_bins(&[f64::NAN]).is_empty());
    }

    #[test]
    fn a_bar_is_as_long_as_its_share() {
        let part = |value| Part {
            class: "c1",
            value,
            words: "<&>".into(),
            field: Some("/a/b".into()),
        };
        let bar = Bar {
            label: "a".into(),
            value: "4".into(),
            parts: vec![part(3.0), part(1.0)],
            mark: Some(2.0),
        };
        let text = bars("n", &[bar], 8.0).into_string();
        for words in [
            r#"x="0.000%" width="37.500%""#,
            r#"x="37.500%" width="12.500%""#,
            r#"x1="25.000%""#,
            r#"data-field="/a/b""#,
            "&lt;&amp;&gt;",
        ] {
            assert!(text.contains(words), "{words} in {text}");
        }
    }

    #[test]
    fn axes_of_times_name_round_times() {
        let bin = |from, to| Bin { from, to, count: 1 };
        let ticks = x_ticks(Scale::Times, &[bin(0.001, 0.02), bin(0.02, 0.09)]);
        let names: Vec<String> = ticks.into_iter().map(time_tick).collect();
        assert_eq!(names, ["1 ms", "2 ms", "5 ms", "10 ms", "20 ms", "50 ms"]);
    }
}
