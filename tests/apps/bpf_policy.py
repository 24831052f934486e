#!/usr/bin/python3
"""Attaches one BPF program that acts as a policy, and keeps it attached until this process is killed.

bpf_policy.py KIND PORT

KIND: xdp, tcx, netfilter (each lets every packet pass), xdp-drop (drops every packet), or sk_lookup (drops
connections to PORT). Prints "attached" or "unsupported".
"""
import ctypes
import os
import signal
import struct
import sys

BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
PROG_LOAD, LINK_CREATE = 5, 28
LOOPBACK = 1
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long


def bpf(command, attr):
    memory = ctypes.create_string_buffer(attr.ljust(144, b"\0"), 144)
    return LIBC.syscall(ctypes.c_long(BPF), command, memory, 144)


def insn(code, dst=0, src=0, off=0, imm=0):
    return struct.pack("BBhi", code, dst | src << 4, off, imm)


def returns(value):
    return [insn(0xB7, 0, imm=value), insn(0x95)]


port = int(sys.argv[2])
# In struct bpf_sk_lookup the local port is at offset 60. SK_DROP is 0.
drops = [insn(0x61, 2, 1, 60), insn(0x55, 2, off=2, imm=port), *returns(0), *returns(1)]
# For each kind: type of the program, type of the attachment, target, program, link attributes.
# The attributes of netfilter say IPv4, hook LOCAL_OUT.
KINDS = {
    "xdp": (6, 37, LOOPBACK, returns(2), b""),
    "xdp-drop": (6, 37, LOOPBACK, returns(1), b""),
    "tcx": (3, 47, LOOPBACK, returns(0), b""),
    "netfilter": (32, 45, 0, returns(1), struct.pack("IIiI", 2, 3, 5, 0)),
    "sk_lookup": (30, 36, None, drops, b""),
}
kind, attach_type, target, program, more = KINDS[sys.argv[1]]
if target is None:
    target = os.open("/proc/self/ns/net", os.O_RDONLY)
code = ctypes.create_string_buffer(b"".join(program), len(program) * 8)
gpl = ctypes.create_string_buffer(b"GPL")
load = struct.pack("IIQQ", kind, len(program), ctypes.addressof(code), ctypes.addressof(gpl)).ljust(68, b"\0")
loaded = bpf(PROG_LOAD, load + struct.pack("I", attach_type))
linked = bpf(LINK_CREATE, struct.pack("IIII", loaded, target, attach_type, 0) + more) if loaded >= 0 else -1
print("attached" if linked >= 0 else "unsupported", flush=True)
if linked < 0:
    print(os.strerror(ctypes.get_errno()), file=sys.stderr)
signal.pause()
