package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/ops/load"
)

// instanceFile is the file in which a running dev writes its addresses and tokens.
const instanceFile = "dev.json"

// instance has the addresses and tokens of a running dev. Only the file's owner may read it.
type instance struct {
	API                    string `json:"api"` // address of the API, http://HOST:PORT
	Ops                    string `json:"ops"` // address of the ops port
	Token                  string `json:"token"`
	Console                string `json:"console,omitempty"`       // address of the console; empty if it is off
	ConsoleToken           string `json:"console_token,omitempty"` // a system token for the sign-in to the console
	DatabaseURL            string `json:"database_url"`
	ProjectionsDatabaseURL string `json:"projections_database_url"`
	NATSURL                string `json:"nats_url"`
	Trace                  string `json:"trace,omitempty"` // file of spans
	PID                    int    `json:"pid"`
}

// errNoInstance reports that a data directory has no dev.json.
var errNoInstance = errors.New("no `tidings dev` is running here. Start it, or name another directory with --data")

func readInstance(dir string) (instance, error) {
	var in instance
	b, err := os.ReadFile(filepath.Join(dir, instanceFile))
	if errors.Is(err, fs.ErrNotExist) {
		return in, fmt.Errorf("%s: %w", dir, errNoInstance)
	}
	if err != nil {
		return in, fmt.Errorf("read the addresses of dev: %w. Name another directory with --data", err)
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return in, fmt.Errorf("read the addresses of dev from %s: %w", filepath.Join(dir, instanceFile), err)
	}
	return in, nil
}

// write writes the file into dev's data directory.
func (in instance) write(dir string) error {
	content, err := json.MarshalIndent(in, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the addresses of dev: %w", err)
	}
	return writeFile(filepath.Join(dir, instanceFile), content)
}

// writeFile replaces the file atomically: a reader, or the next start after a crash, finds either
// the old content or the new.
func writeFile(path string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.Write(content)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(f.Name())))
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// dataFlag adds --data to a command that works with a running dev.
func dataFlag(c *cobra.Command, dir *string) {
	c.Flags().StringVar(dir, "data", "", "the data `directory` of a running dev (default: as for tidings dev)")
}

// defaultData returns the data directory of a dev that was started without --data.
func (p Process) defaultData() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/lib/tidings/dev", nil
	}
	if dir, ok := p.Env.Lookup("XDG_DATA_HOME"); ok && filepath.IsAbs(dir) { // XDG base directories 0.8: ignore relative ones
		return filepath.Join(dir, "tidings", "dev"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the data directory: %w; name it with --data", err)
	}
	return filepath.Join(home, ".local", "share", "tidings", "dev"), nil
}

// instance returns the addresses and tokens of the dev that uses the data directory; "" means the
// default directory.
func (p Process) instance(data string) (instance, error) {
	dir, err := p.dataDir(data)
	if err != nil {
		return instance{}, err
	}
	return readInstance(dir)
}

// running is instance, and an error if that dev has ended. A killed dev leaves its file behind.
func (p Process) running(data string) (instance, error) {
	in, err := p.instance(data)
	if err != nil {
		return in, err
	}
	if err := syscall.Kill(in.PID, 0); errors.Is(err, syscall.ESRCH) {
		dir, _ := p.dataDir(data) // p.instance has found it
		return in, fmt.Errorf("%s: the `tidings dev` that wrote this file (process %d) has ended. Start it again, or name another "+
			"directory with --data", filepath.Join(dir, instanceFile), in.PID)
	}
	return in, nil
}

// api fills in the address of the API and the token from the running dev, if a flag did not give
// them. explain adds to an error of the API what the caller cannot know: that the file may be of
// another server, because a process id or a port was used again.
func (p Process) api(data string, url, token *string) (explain func(error) error, err error) {
	explain = func(err error) error { return err }
	if *url != "" && *token != "" {
		return explain, nil
	}
	in, err := p.running(data)
	if err != nil {
		return nil, fmt.Errorf("%w, or give --url and --token", err)
	}
	if *token == "" {
		dir, _ := p.dataDir(data) // p.running has found it
		explain = func(err error) error {
			if refused, is := errors.AsType[*load.RefusedError](err); client.StatusOf(err) == http.StatusUnauthorized ||
				is && refused.Status == http.StatusUnauthorized {
				return fmt.Errorf("%w. The token is that of %s, and %s does not know it, perhaps because it serves another database. "+
					"Start the dev of this file again, name the directory of the server's dev with --data, or give --url and --token",
					err, filepath.Join(dir, instanceFile), *url)
			}
			return err
		}
	}
	*url, *token = cmp.Or(*url, in.API), cmp.Or(*token, in.Token)
	return explain, nil
}

// dataDir returns data, or the default directory if data is "".
func (p Process) dataDir(data string) (string, error) {
	if data == "" {
		return p.defaultData()
	}
	return data, nil
}

// servers is the environment of the commands that connect to the databases and to NATS.
type servers struct {
	DatabaseURL            string `env:"DATABASE_URL"`
	ProjectionsDatabaseURL string `env:"PROJECTIONS_DATABASE_URL, default=$DATABASE_URL"`
	Postgres               postgres.Config
	Broker                 broker.Config
}

// servers returns the servers of the dev that --data names, else those of the environment, else
// those of the default dev.
func (p Process) servers(ctx context.Context, data string) (servers, error) {
	var s servers
	if err := envconfig.ProcessWith(ctx, &envconfig.Config{Target: &s, Lookuper: p.Env}); err != nil {
		return s, &usageError{fmt.Errorf("read the environment: %w", err)}
	}
	if data == "" && s.DatabaseURL != "" {
		return s, errors.Join(s.Postgres.Validate(), s.Broker.Validate())
	}
	in, err := p.running(data)
	if err != nil {
		return s, fmt.Errorf("%w, or set DATABASE_URL and NATS_URL", err)
	}
	s.DatabaseURL, s.ProjectionsDatabaseURL, s.Broker.URL = in.DatabaseURL, in.ProjectionsDatabaseURL, in.NATSURL
	return s, nil
}
