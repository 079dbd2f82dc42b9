package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// natsKeys makes an operator and an account, and a server that trusts them. sign writes the
// credentials of a role.
func natsKeys(t *testing.T) (dir string, b *testkit.Broker, sign func(file, role string, args ...string) (path string)) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "keys")
	if code, _, stderr := run(t, nil, "", "nats", "account", dir); code != exitOK {
		t.Fatal(stderr)
	}
	return dir, testkit.NATSWith(t, contents(t, filepath.Join(dir, "nats-account.conf"))), func(file, role string, args ...string) string {
		t.Helper()
		path := filepath.Join(dir, file)
		args = append([]string{"nats", "creds", "--keys", dir, "--role", role, "--out", path}, args...)
		if code, _, stderr := run(t, nil, "", args...); code != exitOK {
			t.Fatal(stderr)
		}
		return path
	}
}

func contents(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// userOf returns the claims of a credentials file.
func userOf(t *testing.T, path string) *jwt.UserClaims {
	t.Helper()
	token, err := jwt.ParseDecoratedJWT([]byte(contents(t, path)))
	if err != nil {
		t.Fatal(err)
	}
	claims, err := jwt.DecodeUserClaims(token)
	if err != nil {
		t.Fatal(err)
	}
	return claims
}

// connectWith connects as the binaries do, and fails the test unless the server accepts the
// credentials.
func connectWith(t *testing.T, cfg broker.Config, credentials string) *nats.Conn {
	t.Helper()
	cfg.Credentials = credentials
	nc, err := broker.Connect(cfg, "test", testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	testkit.Eventually(t, "the connection", func() (bool, error) { return nc.IsConnected(), nc.LastError() })
	return nc
}

func TestCredentialsExpireUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	_, _, sign := natsKeys(t)
	if left := time.Until(time.Unix(userOf(t, sign("a.creds", "api")).Expires, 0)); (left - 90*24*time.Hour).Abs() > time.Hour {
		t.Errorf("the credentials expire in %s, want 90 days", left)
	}
	if at := userOf(t, sign("b.creds", "api", "--expires", "0")).Expires; at != 0 {
		t.Errorf("with --expires 0 they expire at %d", at)
	}
}

// TestRevokedCredentialsLoseTheirConnection: the server closes the connection at the reload, and
// admits no new one. All other connections stay.
func TestRevokedCredentialsLoseTheirConnection(t *testing.T) {
	t.Parallel()
	dir, b, sign := natsKeys(t)
	conf := filepath.Join(dir, "nats-account.conf")
	stolen, kept, lost := sign("relay.creds", "relay"), sign("api.creds", "api"), sign("consumer.creds", "consumer")
	victim, other, third := connectWith(t, b.Config(), stolen), connectWith(t, b.Config(), kept), connectWith(t, b.Config(), lost)
	revoke := func(args ...string) (int, string, string) {
		return run(t, nil, "", append([]string{"nats", "revoke", "--keys", dir}, args...)...)
	}
	code, stdout, stderr := revoke("--creds", stolen)
	if code != exitOK || !strings.Contains(stdout, userOf(t, stolen).Subject) || !strings.Contains(stdout, "nats-server --signal reload") {
		t.Fatalf("%d: %s%s", code, stdout, stderr)
	}
	b.Reload(t, contents(t, conf))
	testkit.Eventually(t, "four attempts with revoked credentials", func() (bool, error) {
		return !victim.IsConnected() && victim.Stats().Reconnects >= 4, nil
	})
	if err := other.Flush(); err != nil || other.Stats().Reconnects != 0 || !third.IsConnected() {
		t.Errorf("another user: %v, %d reconnects", err, other.Stats().Reconnects)
	}
	if _, err := nats.Connect(b.URL, nats.UserCredentials(stolen), nats.Timeout(arriveWithin)); err == nil {
		t.Error("the server admits revoked credentials")
	}

	// by its key, without the file; the first revocation stays, also when the accounts are made
	// again
	if code, stdout, stderr := revoke("--user-key", userOf(t, lost).Subject); code != exitOK {
		t.Fatalf("%d: %s%s", code, stdout, stderr)
	}
	if code, _, stderr := run(t, nil, "", "nats", "account", dir, "--subscriber", "name=feed,tenant=7"); code != exitOK {
		t.Fatal(stderr)
	}
	b.Reload(t, contents(t, conf))
	testkit.Eventually(t, "four attempts with revoked credentials", func() (bool, error) {
		return !third.IsConnected() && third.Stats().Reconnects >= 4, nil
	})
	if _, err := nats.Connect(b.URL, nats.UserCredentials(stolen), nats.Timeout(arriveWithin)); err == nil {
		t.Error("the server admits credentials that were revoked earlier")
	}
	sign("relay.creds", "relay") // replaces the file
	testkit.Eventually(t, "the process to connect with new credentials", func() (bool, error) {
		return victim.IsConnected(), nil
	})
	if err := other.Flush(); err != nil || other.Stats().Reconnects != 0 {
		t.Errorf("another user: %v, %d reconnects", err, other.Stats().Reconnects)
	}
}

func TestARevocationThatWouldRevokeNothingIsRefused(t *testing.T) {
	t.Parallel()
	dir, _, sign := natsKeys(t)
	_, _, signElsewhere := natsKeys(t)
	foreign, creds := signElsewhere("b.creds", "api"), sign("a.creds", "api")
	conf := filepath.Join(dir, "nats-account.conf")
	before := contents(t, conf)
	for what, c := range map[string]struct {
		args []string
		want string
	}{
		"another account":    {[]string{"--keys", dir, "--creds", foreign}, "belongs to the account"},
		"no keys":            {[]string{"--keys", t.TempDir(), "--creds", creds}, "belongs to the account"},
		"no credentials":     {[]string{"--keys", dir, "--creds", conf}, "read the credentials"},
		"a key that is none": {[]string{"--keys", dir, "--user-key", "UABC"}, "not the public key"},
		"nobody":             {[]string{"--keys", dir}, "either --creds or"},
		"two":                {[]string{"--keys", dir, "--creds", creds, "--user-key", "UABC"}, "either --creds or"},
	} {
		if code, _, stderr := run(t, nil, "", append([]string{"nats", "revoke"}, c.args...)...); code == exitOK ||
			!strings.Contains(stderr, c.want) {
			t.Errorf("%s: %d, %s; want an error with %q", what, code, stderr, c.want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "revoked")); !os.IsNotExist(err) || contents(t, conf) != before {
		t.Errorf("a refused revocation changed the configuration: %v", err)
	}
}

// TestAUserThatIsRemovedLosesItsConnection is the same for users in a file: the file without the
// user, and a reload.
func TestAUserThatIsRemovedLosesItsConnection(t *testing.T) {
	t.Parallel()
	users := func(subscribers ...string) string {
		t.Helper()
		args := []string{"nats", "users"}
		for _, s := range subscribers {
			args = append(args, "--subscriber", s)
		}
		code, stdout, stderr := run(t, nil, "", args...)
		if code != exitOK {
			t.Fatal(stderr)
		}
		// The server would take the variables from the environment, which the tests of the package
		// share.
		return regexp.MustCompile(`\$NATS_PASSWORD_\w+`).ReplaceAllString(stdout, "secret")
	}
	b := testkit.NATSWith(t, users("name=acme,tenant=7", "name=other,tenant=8"))
	connect := func(user string) *nats.Conn {
		cfg := b.Config()
		cfg.URL = strings.Replace(b.URL, "nats://", "nats://"+user+":secret@", 1)
		return connectWith(t, cfg, "")
	}
	acme, other, relay := connect("t7_acme"), connect("t8_other"), connect("relay")
	b.Reload(t, users("name=other,tenant=8"))
	testkit.Eventually(t, "four attempts of the removed user", func() (bool, error) {
		return !acme.IsConnected() && acme.Stats().Reconnects >= 4, nil
	})
	for _, nc := range []*nats.Conn{other, relay} {
		if err := nc.Flush(); err != nil || nc.Stats().Reconnects != 0 {
			t.Errorf("another user: %v, %d reconnects", err, nc.Stats().Reconnects)
		}
	}
}
