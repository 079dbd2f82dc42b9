package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// readyTimeout bounds the whole request. It is longer than the service's own checks take.
const readyTimeout = 5 * time.Second

func (p Process) readyCommand() *cobra.Command {
	var url string
	c := p.command(command{
		use:   "ready",
		short: "Check whether a service on this machine is ready, for the health check of a container",
		long: `Ready requests /readyz from the service whose OPS_ADDR is in the environment, or from --url. The
exit code is 0 if the service is ready. Otherwise it is 1, and the output has the reason.`,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			if url == "" {
				addr, _ := s.Env.Lookup("OPS_ADDR")
				if _, _, err := net.SplitHostPort(addr); err != nil {
					return nil, &usageError{fmt.Errorf("neither --url nor OPS_ADDR (host:port) names a service: OPS_ADDR is %q", addr)}
				}
				url = "http://" + addr + "/readyz" // net.Dial takes no host, 0.0.0.0 and [::] for this machine, also without /etc/hosts
			}
			return nil, ready(ctx, url)
		},
	})
	c.Flags().StringVar(&url, "url", "", "the URL of the service's /readyz (default: from OPS_ADDR)")
	return c
}

// ready returns an error unless url answers 200.
func ready(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return &usageError{err}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("not ready, status %d: %s", resp.StatusCode, strings.TrimSpace(string(body)))
	}
	return err
}
