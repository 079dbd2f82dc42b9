package kindfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tidings/tidings/kinds"
)

// Extend returns the set with the kinds of a file added, or changed (kinds.Set.Extend). The error
// joins all errors, each with its line.
func Extend(s *kinds.Set, file []byte) (*kinds.Set, error) {
	doc, d, err := document(file)
	if err != nil {
		return nil, err
	}
	var added kinds.Set
	if err := d.Decode(&added); err != nil {
		return nil, typeErrors(err)
	}
	return s.Extend(&added, func(path []string) int { return lineOf(doc.Content[0], path) })
}

// Write returns the kinds of a set as a file for Extend.
func Write(s *kinds.Set) ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(s), enc.Close()); err != nil {
		return nil, fmt.Errorf("write kinds as a file: %w", err)
	}
	return b.Bytes(), nil
}

// document returns the file's only document, and a strict decoder of it.
func document(file []byte) (*yaml.Node, *yaml.Decoder, error) {
	d := yaml.NewDecoder(bytes.NewReader(file))
	var doc, more yaml.Node
	err := d.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil, nil, errors.New("the file is empty: `{}` is a file without kinds")
	}
	if err != nil {
		return nil, nil, syntaxError(err)
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, nil, fmt.Errorf("line %d: this is a second document: want one", max(more.Line, 1))
	}
	d = yaml.NewDecoder(bytes.NewReader(file))
	d.KnownFields(true)
	return &doc, d, nil
}

var goType = regexp.MustCompile(` (in|into) type (kinds|kindfile)\.\w+| into (kinds|kindfile)\.\w+`)

var unknown = regexp.MustCompile(`field (\S+) not found`)

// typeErrors gives each of the decoder's errors its own line, without the names of Go types.
func typeErrors(err error) error {
	var types *yaml.TypeError
	if !errors.As(err, &types) {
		return syntaxError(err)
	}
	var all []error
	for _, text := range types.Errors {
		all = append(all, errors.New(unknown.ReplaceAllString(goType.ReplaceAllString(text, ""), `there is no member "$1"`)))
	}
	return errors.Join(all...)
}

func syntaxError(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if strings.HasSuffix(text, "cannot start any token") {
		text += ": indent with spaces, not tabs, and quote a value that starts with @, % or `"
	}
	return errors.New(text)
}

// lineOf returns the line of the longest part of the path that exists.
func lineOf(node *yaml.Node, path []string) int {
	line := node.Line
	for _, name := range path {
		for node.Kind == yaml.AliasNode {
			node = node.Alias
		}
		found := false
		for i := 0; node.Kind == yaml.MappingNode && i+1 < len(node.Content) && !found; i += 2 {
			if node.Content[i].Value == name {
				line, node, found = node.Content[i].Line, node.Content[i+1], true
			}
		}
		if !found {
			break
		}
	}
	return line
}
