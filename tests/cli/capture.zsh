# What zsh offers for a line ($1): a second zsh completes it, and tells what is added.
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PROMPT=; autoload -U compinit; compinit -u -D; eval "$(phalanx --show-completion)"'
zpty -w shell 'compadd() { typeset -a hits; builtin compadd -A hits "$@"; print -rl -- OFFER${:-:}${^hits} }'
zpty -w shell 'told() { _phalanx_completion; print -r -- OFFER${:-ED} }; compdef told phalanx'
zpty -w shell 'bindkey "^I" complete-word'
zpty -w -n shell "$1"$'\t'
zpty -r shell out '*OFFERED*'
print -r -- $out
zpty -d shell
