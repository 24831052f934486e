/* Announces Fastsocket to the host at the other end of a connection, by a TCP option of 8 bytes:
 *
 *	kind 254 (experiment, RFC 6994) | length 8 | ExID 0x4653 | version 1 | the host's number, 24 bits
 *
 * The opening side writes the option on its SYN, and the accepting side on the SYN-ACK that
 * answers such a SYN. The opening side then repeats it from the third segment on, until the
 * other end has shown that it has the connection. So the accepting side reads the option when
 * the connection becomes established. It stores nothing for a SYN, so SYN cookies and deferred
 * accepts need no special case. (With fast open, that segment is the SYN.)
 *
 * A host without this program skips the option (RFC 9293, 3.2). Retransmissions do not carry it.
 * So if a device on the way drops packets with unknown options, that costs one retransmission,
 * but no connection.
 *
 * The option is a hint and not a proof, because any process can send it.
 */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "counters.h"

char LICENSE[] SEC("license") = "GPL";

#define AF_INET 2
#define SYN 0x02
#define ACK 0x10

#define KIND 254
#define LENGTH 8
/* "FS" */
#define EXID 0x4653
#define VERSION 1

/* Number of remote addresses that are kept, of hosts that have announced themselves. The oldest
 * go first. */
#define HOSTS 4096

struct option {
	__u8 kind;
	__u8 length;
	__be16 exid;
	/* Version in the upper 8 bits, number in the others. */
	__be32 host;
};

/* An IPv6 address, or an IPv4 address in v4-mapped form. */
struct address {
	__u32 word[4];
};

/* This host's number, 1 to 2^24 - 1. */
const volatile __u32 own_number = 0;

/* Number of the host at the other end of a socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} sockets SEC(".maps");

/* The same by address, as the last connection with that address has shown it. For people.
 * Network namespaces that use the same address for different hosts share an entry. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, HOSTS);
	__type(key, struct address);
	__type(value, __u32);
} hosts SEC(".maps");

enum reason {
	/* A connection opened to, or accepted from, a host that has announced itself. */
	OPENED,
	ACCEPTED,
	/* A connection with a host that has announced nothing. */
	WITHOUT,
	REASONS,
};
COUNTERS(reasons, REASONS);

static __always_inline void set_writes(struct bpf_sock_ops *ops, bool writes)
{
	__u32 others = ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;

	bpf_sock_ops_cb_flags_set(ops, others | (writes ? BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG : 0));
}

/* The host number in a packet: in the SYN that is being answered, or in the segment that has
 * just come. 0: none. */
static __always_inline __u32 number_in(struct bpf_sock_ops *ops, __u64 which)
{
	struct option option = { .kind = KIND, .length = 4, .exid = bpf_htons(EXID) };
	__u32 host;

	if (bpf_load_hdr_opt(ops, &option, sizeof(option), which) != LENGTH)
		return 0;
	host = bpf_ntohl(option.host);
	return host >> 24 == VERSION ? host & 0xffffff : 0;
}

static __always_inline void remote(struct bpf_sock_ops *ops, struct address *to)
{
	__u32 v4 = ops->remote_ip4, last = ops->remote_ip6[3];

	/* (The verifier refuses a load at a computed offset of the context. A choice between two
	 * fields would become such a load.) */
	barrier_var(v4);
	barrier_var(last);
	if (ops->family == AF_INET) {
		to->word[0] = to->word[1] = 0;
		to->word[2] = bpf_htonl(0xffff);
		to->word[3] = v4;
	} else {
		to->word[0] = ops->remote_ip6[0];
		to->word[1] = ops->remote_ip6[1];
		to->word[2] = ops->remote_ip6[2];
		to->word[3] = last;
	}
}

static __always_inline bool is_loopback(struct bpf_sock_ops *ops)
{
	struct address to;

	remote(ops, &to);
	if (to.word[0] || to.word[1])
		return false;
	if (to.word[2] == bpf_htonl(0xffff))
		return (to.word[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !to.word[2] && to.word[3] == bpf_htonl(1);
}

static __always_inline bool established(struct bpf_sock_ops *ops, enum reason how)
{
	__u32 number = number_in(ops, 0), *known;
	struct bpf_sock *sk = ops->sk;
	struct address from;

	remote(ops, &from);
	known = bpf_map_lookup_elem(&hosts, &from);
	if (!number) {
		if (known)
			bpf_map_delete_elem(&hosts, &from);
		COUNT(reasons, WITHOUT);
		return false;
	}
	if (!known || *known != number)
		bpf_map_update_elem(&hosts, &from, &number, BPF_ANY);
	if (sk)
		bpf_sk_storage_get(&sockets, sk, &number, BPF_SK_STORAGE_GET_F_CREATE);
	COUNT(reasons, how);
	return true;
}

static __always_inline void reserve(struct bpf_sock_ops *ops)
{
	__u32 flags = ops->skb_tcp_flags;

	if (flags & SYN) {
		if (flags & ACK ? !number_in(ops, BPF_LOAD_HDR_OPT_TCP_SYN) : ops->total_retrans != 0)
			return;
	} else if (ops->total_retrans || ops->bytes_received || ops->bytes_acked > 1) {
		/* The other end has the connection, or a segment was lost. (1: the SYN counts as
		 * one byte.) */
		set_writes(ops, false);
		return;
	}
	/* If other options leave no room, the packet does not carry this one. */
	bpf_reserve_hdr_opt(ops, LENGTH, 0);
}

SEC("sockops")
int announce(struct bpf_sock_ops *ops)
{
	struct option option = {
		.kind = KIND,
		.length = LENGTH,
		.exid = bpf_htons(EXID),
		.host = bpf_htonl(VERSION << 24 | own_number),
	};

	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		if (!is_loopback(ops))
			set_writes(ops, true);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		set_writes(ops, true);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		reserve(ops);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		bpf_store_hdr_opt(ops, &option, sizeof(option), 0);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		/* (A connection within this host has not written the option, so it does not
		 * ask.) */
		if (ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG && !established(ops, OPENED))
			set_writes(ops, false);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		/* The connection has inherited the listener's flags. With fast open the SYN-ACK
		 * is still to be sent, so the flag stays set. */
		if (is_loopback(ops) || !established(ops, ACCEPTED) || !(ops->skb_tcp_flags & SYN))
			set_writes(ops, false);
		break;
	}
	return 1;
}
