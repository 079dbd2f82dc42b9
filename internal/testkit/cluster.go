package testkit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/migrations"
)

// roomy returns the directory for the files of tests. It is /dev/shm if that has at least 4 GiB and
// allows this user files and programs, and TMPDIR is not set. A database has a thousand files.
// Their creation takes the kernel a tenth of a second on a disk, and a tenth of that in memory.
func roomy() string {
	const memory, enough = "/dev/shm", 4 << 30
	var fs unix.Statfs_t
	if os.Getenv("TMPDIR") != "" || unix.Statfs(memory, &fs) != nil || int64(fs.Bavail)*int64(fs.Bsize) < enough ||
		fs.Flags&unix.MS_NOEXEC != 0 || unix.Access(memory, unix.W_OK|unix.X_OK) != nil {
		return os.TempDir()
	}
	return memory
}

// databaseName is the migrated database on the servers of CopyCluster, and that of `tidings dev`.
// It is also the template of the tests' databases, because each copy of a database has 750 files.
const databaseName = "tidings"

// CopyCluster fills dir with a stopped cluster for pglocal.Start. It has a migrated database
// "tidings". Initdb and the migrations take two seconds of a processor, and the tests start a
// hundred servers.
func CopyCluster(t testing.TB, dir string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := copyCluster(ctx, dir); err != nil {
		t.Fatal(err)
	}
}

func copyCluster(ctx context.Context, dir string) error {
	kept, err := keptCluster(ctx)
	if err != nil {
		return fmt.Errorf("create a PostgreSQL cluster for the tests: %w", err)
	}
	return copyTree(ctx, kept, dir)
}

// copyTree copies files with their owners and permissions, because PostgreSQL may run as another
// user.
func copyTree(ctx context.Context, from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "cp", "-a", from+"/.", to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}

// keptCluster returns the directory of a cluster that every test binary on this machine copies. The
// first binary that needs it creates it. A cluster that no binary has used for a week is removed.
func keptCluster(ctx context.Context) (string, error) {
	bin, err := pglocal.Find(0)
	if err != nil {
		return "", err
	}
	parent, err := os.UserCacheDir()
	if err == nil {
		parent = filepath.Join(parent, "tidings-test")
		err = os.MkdirAll(parent, 0o700)
	}
	if err != nil {
		parent = os.TempDir() // only for this binary
	}
	kept := filepath.Join(parent, fmt.Sprintf("cluster-%d-%s", bin.Version, migrations.Hash()))
	if _, err := os.Stat(kept); err == nil {
		return kept, os.Chtimes(kept, time.Time{}, time.Now())
	}
	made, err := makeCluster(ctx)
	if err != nil {
		return "", err
	}
	if err := removeUnused(parent); err != nil {
		return "", err
	}
	fresh, err := os.MkdirTemp(parent, "new-")
	if err != nil {
		return "", err
	}
	if err := copyTree(ctx, made, fresh); err != nil {
		return "", err
	}
	if err := os.Rename(fresh, kept); err != nil {
		if _, serr := os.Stat(kept); serr != nil {
			return "", err
		}
		err = os.RemoveAll(fresh) // another binary has created it meanwhile
		return kept, err
	}
	return kept, os.RemoveAll(made)
}

func removeUnused(parent string) error {
	all, err := os.ReadDir(parent)
	for _, d := range all {
		info, ierr := d.Info()
		if ierr == nil && time.Since(info.ModTime()) > 7*24*time.Hour {
			err = errors.Join(err, os.RemoveAll(filepath.Join(parent, d.Name())))
		}
	}
	return err
}

// makeCluster returns a directory with a stopped server that has the template database of the
// tests.
func makeCluster(ctx context.Context) (dir string, err error) {
	if dir, err = scratch("cluster"); err != nil {
		return "", err
	}
	cfg := pglocal.Config{Dir: dir, Unsafe: true, Settings: localSettings()}
	s, err := pglocal.Start(ctx, cfg)
	if err != nil {
		return "", err
	}
	l := &local{cfg: cfg, s: s}
	err = hashOnce(ctx, l)
	if err == nil {
		err = admin(ctx, l, func(conn *pgx.Conn) error {
			_, err := ensureTemplate(ctx, l, conn)
			return err
		})
	}
	if err := errors.Join(err, s.Stop()); err != nil {
		return "", err
	}
	for _, own := range []string{"lock", "port", "postgres.log"} { // each server creates its own
		err = errors.Join(err, os.Remove(filepath.Join(dir, own)))
	}
	return dir, err
}
