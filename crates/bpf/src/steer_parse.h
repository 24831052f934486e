/* Parses a packet from Ethernet to TCP: VLAN tags, IPv4 options, IPv6 extension headers. A
 * packet without a whole TCP header over Ethernet is passed to the stack and its reason counted;
 * it is never dropped. */
#ifndef FSOCKET_STEER_PARSE_H
#define FSOCKET_STEER_PARSE_H

#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86DD
#define ETH_P_8021Q 0x8100
#define ETH_P_8021AD 0x88A8

#define IPPROTO_HOPOPTS 0
#define IPPROTO_TCP 6
#define IPPROTO_ROUTING 43
#define IPPROTO_FRAGMENT 44
#define IPPROTO_AH 51
#define IPPROTO_DSTOPTS 60

/* Packets with more do not occur in practice, and are passed to the stack. */
#define MAX_VLANS 2
#define MAX_EXTENSIONS 6

struct eth_header {
	__u8 to[6];
	__u8 from[6];
	__be16 proto;
} __attribute__((packed));

struct vlan_header {
	__be16 tag;
	__be16 proto;
};

struct ipv4_header {
	__u8 version_ihl;
	__u8 tos;
	__be16 length;
	__be16 id;
	/* Bit 13: more fragments; bits 0-12: offset. */
	__be16 fragment;
	__u8 ttl;
	__u8 proto;
	__be16 check;
	__be32 from;
	__be32 to;
};

struct ipv6_header {
	__be32 version_class_label;
	__be16 length;
	__u8 next;
	__u8 hops;
	__be32 from[4];
	__be32 to[4];
};

struct ipv6_extension {
	__u8 next;
	/* Length in units of 8 bytes beyond the first 8 (AH: 4 bytes beyond 8). */
	__u8 length;
	__u8 rest[6];
};

struct tcp_header {
	__be16 from;
	__be16 to;
	__be32 seq;
	__be32 ack;
	__u8 offset;
	__u8 flags;
	__be16 window;
	__be16 check;
	__be16 urgent;
};

enum parsed { PARSED_TCP, PARSED_OTHER, PARSED_FRAGMENT, PARSED_SHORT };

static __always_inline enum parsed parse_tcp(void *at, void *end, struct steer_packet *packet)
{
	struct tcp_header *tcp = at;

	if ((void *)(tcp + 1) > end)
		return PARSED_SHORT;
	packet->remote_port = bpf_ntohs(tcp->from);
	packet->local_port = bpf_ntohs(tcp->to);
	packet->tcp_flags = tcp->flags;
	return PARSED_TCP;
}

static __always_inline enum parsed parse_ipv4(void *at, void *end, struct steer_packet *packet)
{
	struct ipv4_header *ip = at;
	__u32 length;

	if ((void *)(ip + 1) > end)
		return PARSED_SHORT;
	length = (ip->version_ihl & 15) * 4;
	if (length < sizeof(*ip))
		return PARSED_SHORT;
	if (ip->proto != IPPROTO_TCP)
		return PARSED_OTHER;
	if (ip->fragment & bpf_htons(0x3fff))
		return PARSED_FRAGMENT;
	packet->version = 4;
	packet->remote_ip[2] = packet->local_ip[2] = bpf_htonl(0xffff);
	packet->remote_ip[3] = ip->from;
	packet->local_ip[3] = ip->to;
	return parse_tcp(at + length, end, packet);
}

static __always_inline enum parsed parse_ipv6(void *at, void *end, struct steer_packet *packet)
{
	struct ipv6_header *ip = at;
	__u8 next;

	if ((void *)(ip + 1) > end)
		return PARSED_SHORT;
	next = ip->next;
	packet->version = 6;
	for (int i = 0; i < 4; i++) {
		packet->remote_ip[i] = ip->from[i];
		packet->local_ip[i] = ip->to[i];
	}
	at = ip + 1;
	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		struct ipv6_extension *extension = at;

		if (next == IPPROTO_TCP)
			return parse_tcp(at, end, packet);
		if (next == IPPROTO_FRAGMENT)
			return PARSED_FRAGMENT;
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS &&
		    next != IPPROTO_AH)
			return PARSED_OTHER;
		if ((void *)(extension + 1) > end)
			return PARSED_SHORT;
		at += next == IPPROTO_AH ? extension->length * 4 + 8 : extension->length * 8 + 8;
		next = extension->next;
	}
	return PARSED_OTHER;
}

static __always_inline enum parsed parse(void *at, void *end, struct steer_packet *packet)
{
	struct eth_header *eth = at;
	__be16 proto;

	if ((void *)(eth + 1) > end)
		return PARSED_SHORT;
	proto = eth->proto;
	at = eth + 1;
	for (int i = 0; i < MAX_VLANS; i++) {
		struct vlan_header *vlan = at;

		if (proto != bpf_htons(ETH_P_8021Q) && proto != bpf_htons(ETH_P_8021AD))
			break;
		if ((void *)(vlan + 1) > end)
			return PARSED_SHORT;
		proto = vlan->proto;
		at = vlan + 1;
	}
	if (proto == bpf_htons(ETH_P_IP))
		return parse_ipv4(at, end, packet);
	if (proto == bpf_htons(ETH_P_IPV6))
		return parse_ipv6(at, end, packet);
	return PARSED_OTHER;
}

#endif
