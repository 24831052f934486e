//! The arguments of a run, and a line of its table.

#[derive(clap::Args, Debug)]
pub struct Rows {
    /// Seconds of each attack
    #[arg(long, default_value_t = 6.0)]
    pub time: f64,
    /// Seconds of all at once
    #[arg(long, default_value_t = 30.0)]
    pub together: f64,
    /// These rows only
    #[arg(long, value_delimiter = ',')]
    pub row: Vec<u8>,
    /// Also judge times
    #[arg(long)]
    pub strict: bool,
    /// Print every figure
    #[arg(short, long)]
    pub verbose: bool,
}

impl Rows {
    pub fn wants(&self, row: u8) -> bool {
        self.row.is_empty() || self.row.contains(&row)
    }
}

/// One line of the table.
pub struct Line {
    pub row: u8,
    pub name: String,
    pub figure: String,
    pub alone: String,
    pub attacked: String,
    pub stock: String,
    /// Empty if the attack is held.
    pub wrong: Vec<String>,
}

impl Line {
    pub fn print(&self) {
        let verdict = if self.wrong.is_empty() { "held".to_owned() } else { self.wrong.join("; ") };
        println!(
            "{:>3}  {:<40}{:<22}{:>10}{:>10}{:>20}  {verdict}",
            self.row, self.name, self.figure, self.alone, self.attacked, self.stock
        );
    }
}
