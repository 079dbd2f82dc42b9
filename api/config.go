package api

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tidings/tidings/tokens"
)

// Config is the API's environment.
type Config struct {
	Addr               string        `env:"API_ADDR, default=127.0.0.1:8080"`       // where it listens
	CursorKey          string        `env:"API_CURSOR_KEY"`                         // signs cursors: 32 bytes or more in hexadecimal or base64, the same on every API process; behind a comma another one, whose cursors are accepted
	MaxBodyBytes       int64         `env:"API_MAX_BODY_BYTES, default=131072"`     // of a request, 1 KiB..16 MiB; a comment of 16 KiB may take 96 KiB of JSON
	MaxBatchBytes      int64         `env:"API_MAX_BATCH_BYTES, default=4194304"`   // of the body of a batch, 1 KiB..64 MiB; the API holds it three times while it works
	PageCacheBytes     int64         `env:"API_PAGE_CACHE_BYTES, default=16777216"` // of first pages that are kept in memory, 0..1 GiB; 0 for none
	RateRead           tokens.Rate   `env:"API_RATE_READ, default=20000/1s"`        // reads of one token, on this process: a number and whole seconds, or off
	RateWrite          tokens.Rate   `env:"API_RATE_WRITE, default=20000/1s"`       // writes, likewise
	RateAuthor         tokens.Rate   `env:"API_RATE_AUTHOR, default=6000/1m"`       // comments and follows that one user makes, likewise
	RateUnknown        tokens.Rate   `env:"API_RATE_UNKNOWN, default=100/1s"`       // requests of one address with tokens that nobody knows, likewise
	TLSCert            string        `env:"API_TLS_CERT"`                           // path of the certificate chain, PEM; plain HTTP without
	TLSKey             string        `env:"API_TLS_KEY"`                            // path of its key
	AccessLog          bool          `env:"API_ACCESS_LOG, default=false"`          // a line per request, at the level info; else at debug
	AddressConnections int           `env:"API_ADDRESS_CONNECTIONS, default=2048"`  // of one client address, 1..4096: the port takes 4096
	MaxRequests        int           `env:"API_MAX_REQUESTS, default=512"`          // that are worked on at once, 16..100000; beyond it 503
	MaxWait            time.Duration `env:"API_MAX_WAIT, default=1s"`               // when requests take longer, fewer are let in, 10ms..25s
	StopDelay          time.Duration `env:"API_STOP_DELAY, default=0s"`             // from not being ready to taking no more connections, for load balancers to notice, 0..5m
	RequestTimeout     time.Duration `env:"API_REQUEST_TIMEOUT, default=10s"`       // for one request, 100ms..25s: below what the server gives it to arrive
}

// Validate reports every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	if _, err := c.CursorKeys(); err != nil {
		errs = append(errs, err)
	}
	if c.MaxBodyBytes < 1<<10 || c.MaxBodyBytes > 16<<20 {
		errs = append(errs, fmt.Errorf("API_MAX_BODY_BYTES is %d: want 1024..16777216", c.MaxBodyBytes))
	}
	if c.MaxBatchBytes < 1<<10 || c.MaxBatchBytes > 64<<20 {
		errs = append(errs, fmt.Errorf("API_MAX_BATCH_BYTES is %d: want 1024..67108864", c.MaxBatchBytes))
	}
	if c.PageCacheBytes < 0 || c.PageCacheBytes > 1<<30 {
		errs = append(errs, fmt.Errorf("API_PAGE_CACHE_BYTES is %d: want 0..1073741824", c.PageCacheBytes))
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		errs = append(errs, errors.New("API_TLS_CERT and API_TLS_KEY: want both or none"))
	}
	if c.AddressConnections < 1 || c.AddressConnections > 4096 {
		errs = append(errs, fmt.Errorf("API_ADDRESS_CONNECTIONS is %d: want 1..4096", c.AddressConnections))
	}
	if c.MaxRequests < gateFloor || c.MaxRequests > 100_000 {
		errs = append(errs, fmt.Errorf("API_MAX_REQUESTS is %d: want %d..100000", c.MaxRequests, gateFloor))
	}
	if c.MaxWait < 10*time.Millisecond || c.MaxWait > 25*time.Second {
		errs = append(errs, fmt.Errorf("API_MAX_WAIT is %s: want 10ms..25s", c.MaxWait))
	}
	if c.RequestTimeout < 100*time.Millisecond || c.RequestTimeout > 25*time.Second {
		errs = append(errs, fmt.Errorf("API_REQUEST_TIMEOUT is %s: want 100ms..25s", c.RequestTimeout))
	}
	if c.StopDelay < 0 || c.StopDelay > 5*time.Minute {
		errs = append(errs, fmt.Errorf("API_STOP_DELAY is %s: want 0s..5m", c.StopDelay))
	}
	return errors.Join(errs...)
}

const minCursorKey = 32 // bytes

// CursorKeys returns the key that signs cursors, and perhaps another one, whose cursors are accepted too: so a key is replaced while clients hold cursors.
func (c Config) CursorKeys() (keys [][]byte, err error) {
	for text := range strings.SplitSeq(c.CursorKey, ",") {
		key, ok := decodeKey(strings.TrimSpace(text))
		if !ok {
			return nil, fmt.Errorf("API_CURSOR_KEY is not %d bytes or more in hexadecimal or base64 (openssl rand -hex %d makes one), or two such keys with a comma between them", minCursorKey, minCursorKey)
		}
		keys = append(keys, key)
	}
	if len(keys) > 2 {
		return nil, fmt.Errorf("API_CURSOR_KEY has %d keys: want the one that signs, and at most one that is accepted too", len(keys))
	}
	return keys, nil
}

func decodeKey(text string) (key []byte, ok bool) {
	for _, decode := range []func(string) ([]byte, error){
		hex.DecodeString, base64.StdEncoding.DecodeString, base64.URLEncoding.DecodeString, base64.RawStdEncoding.DecodeString, base64.RawURLEncoding.DecodeString,
	} {
		if key, err := decode(text); err == nil && len(key) >= minCursorKey {
			return key, true
		}
	}
	return nil, false
}
