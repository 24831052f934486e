//! As much of HTTP as a GET needs.

/// Longest request or answer head.
pub const MAX_HEAD: usize = 16 << 10;

/// Bytes of the head that `bytes` begins with, empty line included.
pub fn head_length(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4)
}

/// Value of a header field, without blanks around it.
fn field<'a>(head: &'a [u8], name: &str) -> Option<&'a [u8]> {
    head.split(|byte| *byte == b'\n').skip(1).find_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        line[..colon].eq_ignore_ascii_case(name.as_bytes()).then(|| line[colon + 1..].trim_ascii())
    })
}

/// Does this end of the conversation want another request on the connection?
pub fn wants_keepalive(head: &[u8]) -> bool {
    let first = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let old = first.windows(8).any(|word| word == b"HTTP/1.0");
    match field(head, "connection") {
        Some(value) if value.eq_ignore_ascii_case(b"close") => false,
        Some(value) if value.eq_ignore_ascii_case(b"keep-alive") => true,
        _ => !old,
    }
}

/// Bytes of the body that follows an answer's head; `None`: until the end of
/// the connection.
pub fn body_length(head: &[u8]) -> Option<u64> {
    std::str::from_utf8(field(head, "content-length")?).ok()?.parse().ok()
}

/// A whole answer.
pub fn answer(status: &str, body: &[u8], keepalive: bool) -> Vec<u8> {
    let connection = if keepalive { "keep-alive" } else { "close" };
    let head = format!(
        "HTTP/1.1 {status}\r\nServer: fastsocket-demo\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\
         Connection: {connection}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads() {
        assert_eq!(head_length(b"GET / HTTP/1.1\r\n\r\nrest"), Some(18));
        assert_eq!(head_length(b"GET / HTTP/1.1\r\n\r"), None);
        assert!(wants_keepalive(b"GET / HTTP/1.1\r\n\r\n"));
        assert!(!wants_keepalive(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"));
        assert!(!wants_keepalive(b"GET / HTTP/1.0\r\n\r\n"));
        assert!(wants_keepalive(b"GET / HTTP/1.0\r\nconnection:Keep-Alive\r\n\r\n"));
        let whole = answer("200 OK", b"12345", true);
        let length = head_length(&whole).expect("a head");
        assert_eq!(body_length(&whole[..length]), Some(5));
        assert_eq!(&whole[length..], b"12345");
        assert_eq!(body_length(b"HTTP/1.1 200 OK\r\n\r\n"), None);
    }
}
