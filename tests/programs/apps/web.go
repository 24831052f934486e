// N bytes at /N: web PORT. SIGTERM ends it in good order.
package main

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	server := &http.Server{Addr: "127.0.0.1:" + os.Args[1]}
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.Atoi(r.URL.Path[1:])
		if err != nil {
			http.Error(w, "no number", 400)
			return
		}
		body := bytes.Repeat([]byte("0123456789abcdef"), n/16+1)[:n]
		w.Header().Set("Content-Length", strconv.Itoa(n))
		w.Write(body)
	})
	ended := make(chan struct{})
	go func() {
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		<-c
		limit, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		server.Shutdown(limit)
		close(ended)
	}()
	if err := server.ListenAndServe(); err != http.ErrServerClosed {
		os.Exit(1)
	}
	<-ended
}
