//go:build faults

package cli

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"

	"github.com/tidings/tidings/ops/load"
)

// gate is a proxy to a dev's API. It holds requests back while a load has its limit of answers, so
// that a load does not end before the test disturbs it.
type gate struct {
	load *load.Loader

	mu     sync.Mutex
	limit  int64
	raised chan struct{} // closed and replaced when the limit changes
}

// startGate returns a gate, and a load through it that has not begun.
func (d *dev) startGate(t *testing.T, limit int64, cfg load.Config) (*gate, *load.Loader) {
	t.Helper()
	in := d.instance(t)
	api, err := url.Parse(in.API)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{MaxIdleConnsPerHost: cfg.Concurrency}
	g := &gate{limit: limit, raised: make(chan struct{})}
	proxy := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(api) },
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }} // breaks the client's connection
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.wait(r) {
			proxy.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(func() { server.CloseClientConnections(); server.Close(); transport.CloseIdleConnections() })
	cfg.URL, cfg.Token = server.URL, in.Token
	if g.load, err = load.New(cfg); err != nil {
		t.Fatal(err)
	}
	return g, g.load
}

// wait returns true when the load may have more answers, and false if the client leaves.
func (g *gate) wait(r *http.Request) bool {
	for {
		g.mu.Lock()
		held, raised := g.load.Stats().Done() >= g.limit, g.raised
		g.mu.Unlock()
		if !held {
			return true
		}
		select {
		case <-raised:
		case <-r.Context().Done():
			return false
		}
	}
}

// raise lets the load have as many answers, and those to the requests in progress.
func (g *gate) raise(limit int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limit = limit
	close(g.raised)
	g.raised = make(chan struct{})
}
