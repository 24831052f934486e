"""Flushes the connection tracking of this network namespace, as `conntrack -F` does."""
import os
import socket
import struct

# From linux/netfilter/nfnetlink_conntrack.h: NFNL_SUBSYS_CTNETLINK and IPCTNL_MSG_CT_DELETE.
# Without attributes it deletes all.
DELETE = 1 << 8 | 2
REQUEST_ACK = 5
NETLINK_NETFILTER = 12

with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
    netlink.bind((0, 0))
    netlink.send(struct.pack("=IHHIIBBH", 20, DELETE, REQUEST_ACK, 1, 0, socket.AF_UNSPEC, 0, 0))
    error = struct.unpack_from("=i", netlink.recv(4096), 16)[0]
    if error:
        raise OSError(-error, os.strerror(-error))
