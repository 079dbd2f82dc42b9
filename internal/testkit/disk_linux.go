package testkit

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Disk is a small file system in memory, with the files of one server. A test fills it.
type Disk struct{ dir string }

// newDisk mounts a file system of so many bytes on dir. The end of the test unmounts it. That needs
// a privilege of this machine, which root has outside of a restricted container.
func newDisk(t testing.TB, dir string, bytes int64) *Disk {
	t.Helper()
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=755", bytes))
	}
	if errors.Is(err, fs.ErrPermission) {
		t.Fatalf("a disk for the test: %v: run this test as root, with the right to mount", err)
	}
	if err != nil {
		t.Fatalf("a disk for the test: %v", err)
	}
	t.Cleanup(func() { check(t, "unmount the test's disk", unmount(dir)) })
	return &Disk{dir}
}

// unmount also ends the file systems whose files are in use. It is no error if none is mounted.
func unmount(dir string) error {
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

func (d *Disk) filler() string { return filepath.Join(d.dir, "filler") }

// Fill takes all free space of the disk except so many bytes.
func (d *Disk) Fill(t testing.TB, except int64) {
	t.Helper()
	f, err := os.OpenFile(d.filler(), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatalf("fill a disk: %v", err)
	}
	defer f.Close()
	var size int64
	for range 100_000 { // others take and free space meanwhile, so take it in small steps
		var s unix.Statfs_t
		check(t, "read the free space", unix.Statfs(d.dir, &s))
		n := int64(s.Bavail)*s.Bsize - except
		if n <= 0 {
			return
		}
		n = min(n, 1<<20)
		if err = unix.Fallocate(int(f.Fd()), 0, size, n); err == nil {
			size += n
		} else if !errors.Is(err, unix.ENOSPC) {
			break
		}
	}
	t.Fatalf("fill a disk: %v", err)
}

// Free undoes Fill.
func (d *Disk) Free(t testing.TB) {
	t.Helper()
	check(t, "free a disk", os.Remove(d.filler()))
}

// PostgresOnDisk is PostgresProcess with its files on a disk of so many bytes. It always runs on
// this machine.
func PostgresOnDisk(t testing.TB, bytes int64, settings ...string) (*PG, *Disk) {
	t.Helper()
	skipIfShort(t)
	dir, err := scratch(diskName)
	if err != nil {
		t.Fatalf("a disk for the test: %v", err)
	}
	disk := newDisk(t, dir, bytes)
	l, err := localIn(postgresOn(dir), settings...)
	if err != nil {
		t.Fatalf("PostgreSQL for the test: %v", err)
	}
	stopAtEnd(t, l)
	return &PG{s: l}, disk
}

// NATSOnDisk is NATSProcess with its files on a disk of so many bytes.
func NATSOnDisk(t testing.TB, bytes int64) (*Broker, *Disk) {
	t.Helper()
	skipIfShort(t)
	dir, err := scratch(diskName)
	if err != nil {
		t.Fatalf("a disk for the test: %v", err)
	}
	disk := newDisk(t, dir, bytes)
	return newBrokerIn(t, dir, startChild, ""), disk
}
