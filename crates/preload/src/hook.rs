//! Properties of a hook, as constants. The compiler removes the guards that a hook does not need.

/// The action of a hook in a program where the library has not started (ADR 62).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asleep {
    /// The hook only calls libc's function.
    Passes,
    /// The hook starts the library first.
    Wakes,
    /// The hook does its usual work, without starting the library.
    Runs,
}

/// The effect on a sleeping call after a signal handler with `SA_RESTART` has run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterSignal {
    /// The call does not sleep on a socket.
    NoSleep,
    /// The call continues, unless the socket has a timeout.
    GoesOn,
    /// The call fails with `EINTR`.
    Fails,
}

/// Properties of a hook.
#[derive(Clone, Copy, Debug)]
pub struct Hook {
    /// The function is a cancellation point of glibc: libc's function unwinds a cancelled thread
    /// through the frame of the hook.
    pub point: bool,
    /// The body catches panics itself. No catch is allowed around a frame that cancellation
    /// unwinds, and none is wanted around a fast path.
    pub catches: bool,
    /// The hook changes the cancellation type, so the guard must not change it, too.
    pub sets_type: bool,
    pub asleep: Asleep,
    #[allow(dead_code)] // for docs/hooks.md and the tests
    pub after_signal: AfterSignal,
    /// The first argument is a descriptor, and the call transfers bytes or asks about a
    /// connection.
    pub names_one: bool,
    /// The child of a shell calls this function, so libc's function is looked up before the fork.
    pub shell: bool,
    /// A child that serves a connection calls this function, so libc's function is looked up
    /// before the fork.
    pub child: bool,
    /// The value of `after_signal` for calls of this family that sleep.
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

/// Families of hooks, with the properties that all hooks of a family have.
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

/// Properties, with the names that the table uses.
impl Hook {
    pub const fn point(self) -> Hook {
        Hook { point: true, catches: true, after_signal: self.interrupted, ..self }
    }
    /// The hook sleeps on a socket, and is no cancellation point.
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
