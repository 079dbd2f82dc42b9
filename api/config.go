package api

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/tokens"
)

// Config is the API's configuration from the environment.
type Config struct {
	Addr string `env:"API_ADDR, default=127.0.0.1:8080"` // the address to listen on
	// signs cursors: 32 bytes or more in hexadecimal or base64, the same on every API process. A
	// second key may follow after a comma: its cursors are accepted too
	CursorKey string `env:"API_CURSOR_KEY"`
	// of one request, 1 KiB..16 MiB; a comment of 16 KiB may take 96 KiB of JSON
	MaxBodyBytes int64 `env:"API_MAX_BODY_BYTES, default=131072"`
	// of the body of a batch, 1 KiB..64 MiB; the API holds it three times in memory
	MaxBatchBytes int64 `env:"API_MAX_BATCH_BYTES, default=4194304"`
	// memory for first pages, 0..1 GiB; 0: keep none
	PageCacheBytes int64 `env:"API_PAGE_CACHE_BYTES, default=16777216"`
	// reads per token and process: a number and whole seconds, or off
	RateRead   tokens.Rate `env:"API_RATE_READ, default=20000/1s"`
	RateWrite  tokens.Rate `env:"API_RATE_WRITE, default=20000/1s"` // writes per token and process
	RateAuthor tokens.Rate `env:"API_RATE_AUTHOR, default=6000/1m"` // comments and follows per user and process
	// requests with unknown tokens per address and process
	RateUnknown tokens.Rate `env:"API_RATE_UNKNOWN, default=100/1s"`
	// path of the certificate chain in PEM; empty: plain HTTP
	TLSCert            string `env:"API_TLS_CERT"`
	TLSKey             string `env:"API_TLS_KEY"`                           // path of the certificate's key
	AccessLog          bool   `env:"API_ACCESS_LOG, default=false"`         // log each request at level info; otherwise at debug
	AddressConnections int    `env:"API_ADDRESS_CONNECTIONS, default=2048"` // per client address, 1..4096; the port takes 4096
	MaxRequests        int    `env:"API_MAX_REQUESTS, default=512"`         // in work at once, 16..100000; others get 503
	// if requests take longer, the API admits fewer of them; 10ms..25s
	MaxWait time.Duration `env:"API_MAX_WAIT, default=1s"`
	// from reporting not ready to refusing connections, so that load balancers notice; 0..5m
	StopDelay time.Duration `env:"API_STOP_DELAY, default=0s"`
	// for one request, 100ms..25s; less than the time that the server gives it to arrive
	RequestTimeout time.Duration `env:"API_REQUEST_TIMEOUT, default=10s"`
}

// Validate returns an error that names every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	bad := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	if _, err := c.CursorKeys(); err != nil {
		errs = append(errs, err)
	}
	bad(c.MaxBodyBytes < 1<<10 || c.MaxBodyBytes > 16<<20, "API_MAX_BODY_BYTES is %d: want 1024..16777216", c.MaxBodyBytes)
	bad(c.MaxBatchBytes < 1<<10 || c.MaxBatchBytes > 64<<20, "API_MAX_BATCH_BYTES is %d: want 1024..67108864", c.MaxBatchBytes)
	bad(c.PageCacheBytes < 0 || c.PageCacheBytes > 1<<30, "API_PAGE_CACHE_BYTES is %d: want 0..1073741824", c.PageCacheBytes)
	bad((c.TLSCert == "") != (c.TLSKey == ""), "API_TLS_CERT and API_TLS_KEY: want both or none")
	bad(c.AddressConnections < 1 || c.AddressConnections > 4096, "API_ADDRESS_CONNECTIONS is %d: want 1..4096", c.AddressConnections)
	bad(c.MaxRequests < gateFloor || c.MaxRequests > 100_000, "API_MAX_REQUESTS is %d: want %d..100000", c.MaxRequests, gateFloor)
	bad(c.MaxWait < 10*time.Millisecond || c.MaxWait > 25*time.Second, "API_MAX_WAIT is %s: want 10ms..25s", c.MaxWait)
	bad(c.RequestTimeout < 100*time.Millisecond || c.RequestTimeout > 25*time.Second,
		"API_REQUEST_TIMEOUT is %s: want 100ms..25s", c.RequestTimeout)
	bad(c.StopDelay < 0 || c.StopDelay > 5*time.Minute, "API_STOP_DELAY is %s: want 0s..5m", c.StopDelay)
	return errors.Join(errs...)
}

const minCursorKey = 32 // bytes

// CursorKeys returns the key that signs cursors, and an optional second key whose cursors are
// accepted too. With two keys an operator can replace a key while clients hold cursors.
func (c Config) CursorKeys() (keys [][]byte, err error) {
	for text := range strings.SplitSeq(c.CursorKey, ",") {
		key, ok := decodeKey(strings.TrimSpace(text))
		if !ok {
			return nil, fmt.Errorf("API_CURSOR_KEY is invalid: want a key of %d bytes or more in hexadecimal or base64 (openssl rand -hex "+
				"%d makes one), or two such keys separated by a comma", minCursorKey, minCursorKey)
		}
		keys = append(keys, key)
	}
	if len(keys) > 2 {
		return nil, fmt.Errorf("API_CURSOR_KEY has %d keys: want the one that signs, and at most one more that is accepted", len(keys))
	}
	return keys, nil
}

func decodeKey(text string) (key []byte, ok bool) {
	for _, decode := range []func(string) ([]byte, error){
		hex.DecodeString, base64.StdEncoding.DecodeString, base64.URLEncoding.DecodeString, base64.RawStdEncoding.DecodeString,
		base64.RawURLEncoding.DecodeString,
	} {
		if key, err := decode(text); err == nil && len(key) >= minCursorKey {
			return key, true
		}
	}
	return nil, false
}
