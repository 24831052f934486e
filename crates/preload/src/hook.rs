//! What the table says of a hook, known when the library is compiled.

/// What a hook does in a program in which the library has not begun (ADR 62).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asleep {
    /// It calls libc's function and does nothing else.
    Passes,
    /// It begins the library first.
    Wakes,
    /// It does what it always does, and leaves the library asleep.
    Runs,
}

/// What ends a call that sleeps, when a handler with `SA_RESTART` has run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterSignal {
    /// The call does not sleep for the sake of a socket.
    NoSleep,
    /// The call goes on, unless the socket has a time-out.
    GoesOn,
    /// The call fails with `EINTR`.
    Fails,
}

/// Properties of a hook.
#[derive(Clone, Copy, Debug)]
pub struct Hook {
    /// A cancellation point of glibc: libc's function unwinds a cancelled thread through the frame of the hook.
    pub point: bool,
    /// The body catches panics itself: around what is unwound by cancellation nothing may be caught, and around
    /// a fast path nothing should be.
    pub catches: bool,
    /// It sets the type of cancellation, which the other hooks have to find as the program set it.
    pub sets_type: bool,
    pub asleep: Asleep,
    #[allow(dead_code)] // (Of docs/hooks.md and the tests.)
    pub after_signal: AfterSignal,
    /// Its first argument is a descriptor, through which it transfers bytes or asks about a connection.
    pub names_one: bool,
    /// A shell's child calls it: libc's function is looked up before the fork.
    pub shell: bool,
    /// A child that serves a connection calls it: likewise.
    pub child: bool,
    /// Of the calls of the family that sleep.
    interrupted: AfterSignal,
}

const PLAIN: Hook = Hook {
    point: false,
    catches: false,
    sets_type: false,
    asleep: Asleep::Passes,
    after_signal: AfterSignal::NoSleep,
    names_one: false,
    shell: false,
    child: false,
    interrupted: AfterSignal::NoSleep,
};

/// Families: what hooks of each have in common.
impl Hook {
    pub const fn sockets() -> Hook {
        Hook { names_one: true, interrupted: AfterSignal::GoesOn, ..PLAIN }
    }
    pub const fn io() -> Hook {
        Hook { names_one: true, catches: true, interrupted: AfterSignal::GoesOn, ..PLAIN }
    }
    pub const fn descriptors() -> Hook {
        PLAIN
    }
    pub const fn readiness() -> Hook {
        Hook { catches: true, interrupted: AfterSignal::Fails, ..PLAIN }
    }
    pub const fn process() -> Hook {
        PLAIN
    }
    pub const fn rights() -> Hook {
        Hook { asleep: Asleep::Wakes, ..PLAIN }
    }
    pub const fn uring() -> Hook {
        Hook { asleep: Asleep::Wakes, ..PLAIN }
    }
    pub const fn signals() -> Hook {
        PLAIN
    }
    pub const fn threads() -> Hook {
        Hook { catches: true, sets_type: true, asleep: Asleep::Runs, ..PLAIN }
    }
}

/// Properties, as the table names them.
impl Hook {
    pub const fn point(self) -> Hook {
        Hook { point: true, catches: true, after_signal: self.interrupted, ..self }
    }
    /// It sleeps for the sake of a socket, and is no cancellation point.
    pub const fn sleeps(self) -> Hook {
        Hook { after_signal: self.interrupted, ..self }
    }
    pub const fn catches(self) -> Hook {
        Hook { catches: true, ..self }
    }
    pub const fn wakes(self) -> Hook {
        Hook { asleep: Asleep::Wakes, ..self }
    }
    pub const fn runs(self) -> Hook {
        Hook { asleep: Asleep::Runs, ..self }
    }
    pub const fn names_one(self) -> Hook {
        Hook { names_one: true, ..self }
    }
    pub const fn names_none(self) -> Hook {
        Hook { names_one: false, ..self }
    }
    pub const fn shell(self) -> Hook {
        Hook { shell: true, ..self }
    }
    pub const fn child(self) -> Hook {
        Hook { child: true, ..self }
    }
}
