/* How many sockets have stopped to listen, or have begun to, by port, in all network
 * namespaces together. Who keeps the number that he has read before he was told
 * that a listener is there knows by one look whether that may have changed,
 * however it was closed, and also where another one has come that is nearer.
 *
 * The tracepoint runs before `close` (or `shutdown`, or the end of the process)
 * returns, and while the socket still has a port that it was bound to: who binds
 * that next does so after the count. (A port of the kernel's choice is given back
 * some instructions before; and one that begins is found by others some instructions
 * after the count.)
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "GPL";

#define PORTS 65536

/* One value, which clients map to read. */
struct counts {
	__u32 of[PORTS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct counts);
} closings SEC(".maps");

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(closes, struct sock *sk, int old, int new)
{
	struct counts *counts;
	__u32 zero = 0;
	__be16 port = 0;

	if ((old == TCP_LISTEN) == (new == TCP_LISTEN))
		return 0;
	/* `skc_num` is 0 by now if the kernel has chosen the port. */
	bpf_core_read(&port, sizeof(port), &((struct inet_sock *)sk)->inet_sport);
	counts = bpf_map_lookup_elem(&closings, &zero);
	if (counts)
		__sync_fetch_and_add(&counts->of[bpf_ntohs(port)], 1);
	return 0;
}
