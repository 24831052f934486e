//! The screen of `top` on a terminal. The terminal is restored at the end, also after a panic.

use super::options::{Sort, Top};
use super::plain::{cells, headline, paths, LISTENERS, PROCESSES, REASONS, ZONES};
use super::source::{Source, FIRST};
use super::view::View;
use anyhow::Result;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Gauge, Paragraph, Row, Table};
use ratatui::Frame;
use std::time::{Duration, Instant};

/// The user's choices, and the data on the screen.
struct Screen {
    sort: Sort,
    reverse: bool,
    filter: String,
    /// The user types a filter: keys go into it.
    is_typing: bool,
    is_paused: bool,
    view: Result<View, String>,
}

pub fn run(args: &Top, mut source: Source) -> Result<i32> {
    let mut screen = Screen {
        sort: args.sort,
        reverse: args.reverse,
        filter: args.filter.clone(),
        is_typing: false,
        is_paused: false,
        view: Ok(View::default()),
    };
    // `try_init` also installs a panic hook that restores the terminal.
    let mut terminal = ratatui::try_init()?;
    let result = screen.show(args, &mut source, &mut terminal);
    ratatui::restore();
    result.map(|()| 0)
}

impl Screen {
    fn show(&mut self, args: &Top, source: &mut Source, terminal: &mut ratatui::DefaultTerminal) -> Result<()> {
        let delay = Duration::from_secs_f64(args.delay);
        let mut next = Instant::now() + FIRST.min(delay);
        let mut left = args.count;
        loop {
            terminal.draw(|frame| self.draw(frame))?;
            let wait = next.saturating_duration_since(Instant::now());
            if event::poll(wait)? {
                match event::read()? {
                    Event::Key(key) if key.kind == KeyEventKind::Press && self.key(key) => return Ok(()),
                    _ => continue,
                }
            }
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + delay;
            if left == Some(0) {
                return Ok(());
            }
            left = left.map(|n| n - 1);
            if !self.is_paused {
                self.view = source.look();
            }
        }
    }

    /// Handles a key. Returns whether the program must end.
    fn key(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Backspace if self.is_typing => drop(self.filter.pop()),
            KeyCode::Char(c) if self.is_typing => self.filter.push(c),
            KeyCode::Char('q') => return true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => self.is_typing = true,
            _ => {}
        }
        false
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let [head, gauge, processes, listeners, below, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Fill(3),
            Constraint::Fill(2),
            Constraint::Fill(1),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(self.foot()).style(Style::new().add_modifier(Modifier::DIM)), foot);
        let mut view = match &self.view {
            Ok(view) => view.clone(),
            Err(e) => return frame.render_widget(Paragraph::new(e.as_str()), head),
        };
        view.arrange(self.sort, self.reverse, &self.filter);
        frame.render_widget(Paragraph::new(headline(&view)), head);
        let share = Gauge::default()
            .ratio(view.open.share().unwrap_or(0.0).clamp(0.0, 1.0))
            .label(format!("open: {}", paths(&view.open)));
        frame.render_widget(share, gauge);
        let cells = cells(&view);
        rows(frame, processes, &PROCESSES, 1, cells.processes.iter().map(|r| &r[..]));
        rows(frame, listeners, &LISTENERS, 2, cells.listeners.iter().map(|r| &r[..]));
        let [reasons, zones] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(below);
        rows(frame, reasons, &REASONS, 1, cells.reasons.iter().map(|r| &r[..]));
        rows(frame, zones, &ZONES, 0, cells.zones.iter().map(|r| &r[..]));
    }

    fn foot(&self) -> Line<'static> {
        let order = if self.reverse { "smallest first" } else { "largest first" };
        let sorted = format!("by {}, {order}", self.sort.word());
        let filter = match (self.is_typing, self.filter.is_empty()) {
            (true, _) => format!("filter: {}_", self.filter),
            (false, true) => "no filter".into(),
            (false, false) => format!("filter: {}", self.filter),
        };
        let paused = if self.is_paused { "; paused" } else { "" };
        Line::from(format!("{sorted}; {filter}{paused}   q quit  s sort  r reverse  / filter  p pause"))
    }
}

/// Draws a table. The first column and all columns before `texts` are text, as is PROGRAM. The
/// others are numbers, and so are PID and CPU.
fn rows<'a>(
    frame: &mut Frame<'_>,
    area: Rect,
    header: &[&'a str],
    texts: usize,
    rows: impl Iterator<Item = &'a [String]>,
) {
    let number = |i: usize| i >= texts.max(1) && header[i] != "PROGRAM" || header[i] == "PID" || header[i] == "CPU";
    let cell = |i: usize, text: &str| {
        let alignment = if number(i) { Alignment::Right } else { Alignment::Left };
        Cell::from(Line::from(text.to_owned()).alignment(alignment))
    };
    let widths = header.iter().map(|name| match *name {
        "LISTENER" | "PROGRAM" | "REASON" => Constraint::Fill(1),
        "PID" => Constraint::Length(7),
        name => Constraint::Length((name.len() as u16).max(6)),
    });
    let head = Row::new(header.iter().enumerate().map(|(i, name)| cell(i, name)));
    let body = rows.map(|row| Row::new(row.iter().enumerate().map(|(i, text)| cell(i, text))));
    let table = Table::new(body, widths).header(head.style(Style::new().add_modifier(Modifier::BOLD)));
    frame.render_widget(table, area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::tests::view;
    use ratatui::backend::TestBackend;
    use ratatui::Terminal;

    fn screen() -> Screen {
        Screen {
            sort: Sort::Connections,
            reverse: false,
            filter: String::new(),
            is_typing: false,
            is_paused: false,
            view: Ok(view()),
        }
    }

    fn shown(screen: &Screen, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn everything_is_on_the_screen() {
        let text = shown(&screen(), 120, 30);
        for part in ["monitor 7", "25.0%", "nginx", "curl", "127.0.0.1:80", "remote", "LOCAL/s", "by connections"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // A tiny terminal must not make the program fail, either.
        for (width, height) in [(1, 1), (20, 3), (300, 2)] {
            shown(&screen(), width, height);
        }
    }

    #[test]
    fn keys() {
        let mut s = screen();
        let press = |s: &mut Screen, keys: &str| keys.chars().any(|c| s.key(KeyCode::Char(c).into()));
        assert!(!press(&mut s, "sr/qCURL"), "a q in the filter is a letter");
        assert_eq!((s.sort, s.reverse, s.filter.as_str()), (Sort::Kernel, true, "qCURL"));
        s.filter.remove(0);
        s.key(KeyCode::Enter.into());
        let text = shown(&s, 120, 30);
        assert!(text.contains("curl") && text.contains("filter: CURL") && !text.contains("nginx"), "{text}");
        s.key(KeyCode::Esc.into());
        assert!(s.filter.is_empty());
        assert!(press(&mut s, "q"));
        s.view = Err("nothing runs".into());
        assert!(shown(&s, 80, 10).contains("nothing runs"));
    }
}
